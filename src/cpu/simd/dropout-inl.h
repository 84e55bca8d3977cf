// The dropout mask, a vector of queries by four keys at a time.

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

/// The two halves of the 64-bit product of each lane with `multiplier`.
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

/// Calls body(key row j, lane, factors) with keep_scale or 0 in every lane of every row of the tile.
template <typename Body>
HWY_INLINE void for_each_dropout_factor(const AttentionCall& call, const Panel& panel, const KeyTile& keys,
                                        const Body& body) {
  const DropoutMask& dropout = call.dropout;
  const auto first_head = static_cast<std::uint32_t>(panel.b * call.problem.heads_q);
  // Unsigned comparison by flipping the sign bits of both sides.
  const VU flip = hn::Set(U(), 0x80000000u);
  const VI threshold = hn::Set(I(), static_cast<std::int32_t>(dropout.threshold ^ 0x80000000u));
  for (int lane = 0; lane < panel.width; lane += lanes) {
    const VU query = hn::BitCast(U(), hn::Load(I(), panel.query + lane));
    const VU head = hn::Add(hn::BitCast(U(), hn::Load(I(), panel.head + lane)), hn::Set(U(), first_head));
    // Groups of four keys that share a counter; the first may begin before the tile.
    for (std::int64_t four = keys.first / 4; four * 4 < keys.first + keys.count; ++four) {
      VU words[4] = {hn::Set(U(), static_cast<std::uint32_t>(four)), query, head,
                     hn::Set(U(), dropout.stream)};
      philox_vectors(words, dropout.key);
      for (int word = 0; word < 4; ++word) {
        const std::int64_t j = four * 4 + word - keys.first;
        if (j < 0 || j >= keys.count) continue;
        const VI value = hn::BitCast(I(), hn::Xor(words[word], flip));
        const auto dropped = hn::RebindMask(F(), hn::Lt(value, threshold));
        body(static_cast<int>(j), lane, hn::IfThenZeroElse(dropped, set(dropout.keep_scale)));
      }
    }
  }
}

}  // namespace tilewise::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
