// The dropout mask, drawn for one vector of queries and group keys at a time.

#if defined(TILEWISE_CPU_SIMD_DROPOUT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEWISE_CPU_SIMD_DROPOUT_INL_H
#undef TILEWISE_CPU_SIMD_DROPOUT_INL_H
#else
#define TILEWISE_CPU_SIMD_DROPOUT_INL_H
#endif

#include "attention/dropout.h"
#include "cpu/simd/panel.h"
#include "cpu/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilewise::cpu::simd::HWY_NAMESPACE {

struct WideProduct {
  VU high, low;
};

/// The high and low half of the 64-bit product of each lane and `multiplier`.
HWY_INLINE WideProduct multiply_wide(VU x, std::uint32_t multiplier) {
  const VU m = hn::Set(U(), multiplier);
  const hn::RepartitionToWide<U> wide;
  const auto even = hn::MulEven(x, m);
  const auto odd = hn::MulEven(hn::BitCast(U(), hn::ShiftRight<32>(hn::BitCast(wide, x))), m);
  const VU even_words = hn::BitCast(U(), even);
  const VU odd_words = hn::BitCast(U(), odd);
  return {.high = hn::OddEven(odd_words, hn::BitCast(U(), hn::ShiftRight<32>(even))),
          .low = hn::OddEven(hn::BitCast(U(), hn::ShiftLeft<32>(odd)), even_words)};
}

/// philox() of core/philox.h on vectors.
HWY_INLINE void philox_vectors(VU (&counter)[4], PhiloxKey key) {
  for (int round = 0; round < philox_rounds; ++round) {
    const WideProduct p0 = multiply_wide(counter[0], philox_multiplier0);
    const WideProduct p1 = multiply_wide(counter[2], philox_multiplier1);
    counter[0] = hn::Xor(hn::Xor(p1.high, counter[1]), hn::Set(U(), key.low));
    counter[2] = hn::Xor(hn::Xor(p0.high, counter[3]), hn::Set(U(), key.high));
    counter[1] = p1.low;
    counter[3] = p0.low;
    key.low += philox_weyl0;
    key.high += philox_weyl1;
  }
}

/// Calls body(key j of the tile, first lane, factors) for every vector of the tile. Each factor is 0
/// (dropped) or keep_scale.
template <typename Body>
HWY_INLINE void for_each_dropout_factor(const AttentionCall& call, const Panel& panel, const KeyTile& keys,
                                        const Body& body) {
  const DropoutMask& dropout = call.dropout;
  const Place& place = call.place;
  const std::int64_t first = place.key(keys.first);
  // Signed comparison of values whose sign bits are flipped is unsigned comparison.
  const VU flip = hn::Set(U(), 0x80000000u);
  const VI threshold = hn::Set(I(), static_cast<std::int32_t>(dropout.threshold ^ 0x80000000u));
  const VU step = hn::Set(U(), static_cast<std::uint32_t>(place.step));
  for (int lane = 0; lane < panel.width; lane += lanes) {
    const VU query = hn::Add(hn::Mul(hn::BitCast(U(), hn::Load(I(), panel.query + lane)), step),
                             hn::Set(U(), static_cast<std::uint32_t>(place.q_offset)));
    const VU head = hn::Add(hn::BitCast(U(), hn::Load(I(), panel.head + lane)),
                            hn::Set(U(), place.head_index(panel.b, 0)));
    const auto draw = [&](std::int64_t group, VU(&words)[4]) HWY_ATTR {
      words[0] = hn::Set(U(), static_cast<std::uint32_t>(group));
      words[1] = query;
      words[2] = head;
      words[3] = hn::Set(U(), dropout.stream);
      philox_vectors(words, dropout.key);
    };
    const auto apply_word = [&](std::int64_t j, std::int64_t key, VU word) HWY_ATTR {
      const VU half = key / 4 % 2 == 0 ? hn::ShiftLeft<16>(word) : word;  // as DropoutMask::half()
      const VI value = hn::BitCast(I(), hn::Xor(half, flip));
      const auto dropped = hn::RebindMask(F(), hn::Lt(value, threshold));
      body(static_cast<int>(j), lane, hn::IfThenZeroElse(dropped, set(dropout.keep_scale)));
    };
    VU words[4];
    if (place.step == 1) {
      // Eight neighbouring keys share a Philox counter. The first group may begin before the tile.
      for (std::int64_t group = first / 8; group * 8 < first + keys.count; ++group) {
        draw(group, words);
        for (int key = 0; key < 8; ++key) {
          const std::int64_t j = group * 8 + key - first;
          if (j >= 0 && j < keys.count) apply_word(j, key, words[key % 4]);
        }
      }
    } else {
      for (std::int64_t j = 0; j < keys.count; ++j) {
        const std::int64_t key = place.key(keys.first + j);
        draw(key / 8, words);
        apply_word(j, key, words[key % 4]);
      }
    }
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
