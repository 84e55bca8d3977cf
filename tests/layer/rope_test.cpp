#include "layer/rope_case.h"

namespace tilewise::test::rope_test {
namespace {

using namespace rope_case;

TEST(Rope, every_form_is_near_the_truth) {
  std::uint64_t seed = 0;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (int repeat = 0; repeat < 40; ++repeat) {
      SeededRandom random(++seed);
      const std::int64_t dim = random.between(1, 150);
      const Sizes n{random.between(1, 3),
                    random.between(1, 4),
                    random.between(1, 3),
                    random.between(1, 20),
                    dim,
                    random.chance(0.5) ? dim / 2 * 2 : random.between(0, dim / 2) * 2,
                    random.between(1, 40)};
      Problem p = random_problem(random, n, dtype);
      if (random.chance(0.5)) add_cache(p, random, n, random.chance(0.5));
      check(p, random_context(random));
    }
  }
}

TEST(Rope, in_place_is_the_same) {
  for (const std::string_view kernel : {"simd", "reference"}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SeededRandom random(5);
      Problem p = random_problem(random, {2, 3, 2, 7, 20, 14, 5}, dtype);
      p.options.kernel = kernel;
      run(p);
      Problem in_place = p;
      in_place.out_q = p.q;
      in_place.out_k = p.k;
      run(in_place);
      EXPECT_EQ(in_place.out_q.bytes(), p.out_q.bytes());
      EXPECT_EQ(in_place.out_k.bytes(), p.out_k.bytes());
    }
  }
}

TEST(Rope, the_inverse_turns_back) {
  SeededRandom random(6);
  Problem p = random_problem(random, {2, 3, 2, 7, 20, 20, 5}, DType::f32);
  p.options.inverse = false;
  run(p);
  Problem back = p;
  back.q = p.out_q;
  back.k = p.out_k;
  back.out_q = Buffer(DType::f32, p.q.shape());
  back.out_k = Buffer(DType::f32, p.k.shape());
  back.options.inverse = true;
  run(back);
  const std::vector<double> expected = p.q.values(), got = back.out_q.values();
  for (std::size_t n = 0; n < got.size(); ++n) EXPECT_NEAR(got[n], expected[n], 1e-6);
}

TEST(Rope, places_of_the_cache_that_no_token_takes_are_left_alone) {
  SeededRandom random(7);
  const Sizes n{1, 2, 1, 2, 8, 8, 4};
  Problem p = random_problem(random, n, DType::f32);
  add_cache(p, random, n, false);
  p.cache_starts.set_values(std::vector<double>{3});
  const Buffer before = exact(p.k_cache);
  run(p);
  for (std::int64_t slot = 0; slot < 7; ++slot) {
    for (std::int64_t d = 0; d < 8; ++d) {
      if (slot == 3 || slot == 4) continue;
      EXPECT_EQ(p.k_cache.at(0, 0, slot, d), before.at(0, 0, slot, d));
    }
  }
}

TEST(Rope, nothing_to_turn_is_valid) {
  for (const Sizes& n : {Sizes{0, 2, 1, 3, 8, 8, 4}, {2, 2, 1, 0, 8, 8, 4}, {2, 0, 1, 3, 8, 8, 4}}) {
    SeededRandom random(8);
    Problem p = random_problem(random, n, DType::f32);
    p.options.kernel = "simd";
    check(p, serial_context());
  }
}

TEST(Rope, bad_input_is_named_and_nothing_is_written) {
  struct Mistake {
    std::string_view text;
    void (*make)(Problem& p);
  };
  const Mistake mistakes[] = {
      {"q: expected rank 4 [B, H, S, D], got f32[2, 8]",
       [](Problem& p) { p.q = Buffer(DType::f32, {2, 8}); }},
      {"k: expected batch 2 and length 3, got f32[2, 1, 4, 8]",
       [](Problem& p) { p.k = Buffer(DType::f32, {2, 1, 4, 8}); }},
      {"k: expected the head dim of q, 8, got f32[2, 1, 3, 6]",
       [](Problem& p) { p.k = Buffer(DType::f32, {2, 1, 3, 6}); }},
      {"cos: expected a table [positions, R/2] or [B|1, S, R/2], got f32[36]",
       [](Problem& p) { p.cos = p.sin = Buffer(DType::f32, {36}); }},
      {"cos: expected a table [positions, R/2] or [B|1, S, R/2], got f32[1, 2, 3, 4]",
       [](Problem& p) { p.cos = p.sin = Buffer(DType::f32, {1, 2, 3, 4}); }},
      {"cos: expected at most half the head dim 8, got f32[9, 5]",
       [](Problem& p) { p.cos = p.sin = Buffer(DType::f32, {9, 5}); }},
      {"cos: expected a table of at least 3 positions, got f32[2, 4]",
       [](Problem& p) { p.cos = p.sin = Buffer(DType::f32, {2, 4}); }},
      {"sin: expected the shape of cos, [9, 4], got f32[9, 3]",
       [](Problem& p) { p.sin = Buffer(DType::f32, {9, 3}); }},
      {"positions: expected [B|1, S] with B 2 and S 3, got i32[3, 3]",
       [](Problem& p) { p.positions = Buffer(DType::i32, {3, 3}); }},
      {"positions: expected [B|1, S] with B 2 and S 3, got i32[2, 2]",
       [](Problem& p) { p.positions = Buffer(DType::i32, {2, 2}); }},
      {"positions: expected [B|1, S] with B 2 and S 3, got i32[3]",
       [](Problem& p) { p.positions = Buffer(DType::i32, {3}); }},
      {"q: expected f32, got f16", [](Problem& p) { p.out_q = Buffer(DType::f16, {2, 1, 3, 8}); }},
      {"q: expected the shape of its input, [2, 1, 3, 8], got f32[2, 1, 2, 8]",
       [](Problem& p) { p.out_q = Buffer(DType::f32, {2, 1, 2, 8}); }},
      {"positions: expected i32 or i64, got f32",
       [](Problem& p) { p.positions = Buffer(DType::f32, {2, 3}); }},
      {"positions: expected positions from 0 to 8, got 9",
       [](Problem& p) {
         p.positions = Buffer(DType::i64, {1, 3});
         p.positions.set_values(std::vector<double>{0, 9, 1});
       }},
      {"k_cache: expected room for 3 tokens from position 0, got a cache of 2 tokens for batch entry 0",
       [](Problem& p) { p.k_cache = Buffer(DType::f32, {2, 1, 2, 8}); }},
      {"k_cache: expected rank 4 [B, Hkv, C, D], got f32[2, 1, 8]",
       [](Problem& p) { p.k_cache = Buffer(DType::f32, {2, 1, 8}); }},
      {"k_cache: expected batch 2, got f32[3, 1, 5, 8]",
       [](Problem& p) { p.k_cache = Buffer(DType::f32, {3, 1, 5, 8}); }},
      {"k_cache: expected 1 heads of dim 8, got f32[2, 2, 5, 8]",
       [](Problem& p) { p.k_cache = Buffer(DType::f32, {2, 2, 5, 8}); }},
      {"k_cache: expected 1 heads of dim 8, got f32[2, 1, 5, 6]",
       [](Problem& p) { p.k_cache = Buffer(DType::f32, {2, 1, 5, 6}); }},
      {"k_cache: expected a contiguous last dimension, got stride 5",
       [](Problem& p) { p.k_cache = Buffer(DType::f32, {2, 1, 5, 8}, {.order = {0, 1, 3, 2}}); }},
      {"cache_starts: expected none without a cache, got i32[2]",
       [](Problem& p) { p.cache_starts = Buffer(DType::i32, {2}); }},
      {"page_table: expected none without a cache, got i32[2, 1]",
       [](Problem& p) { p.page_table = Buffer(DType::i32, {2, 1}); }},
      {"page_table: expected [B, max_pages] with B 2, got i32[3, 1]",
       [](Problem& p) {
         p.k_cache = Buffer(DType::f32, {4, 1, 3, 8});
         p.page_table = Buffer(DType::i32, {3, 1});
       }},
      {"page_table: expected [B, max_pages] with B 2, got i32[2]",
       [](Problem& p) {
         p.k_cache = Buffer(DType::f32, {4, 1, 3, 8});
         p.page_table = Buffer(DType::i32, {2});
       }},
      {"page_table: expected pages from 0 to 3, got 4",
       [](Problem& p) {
         p.k_cache = Buffer(DType::f32, {4, 1, 3, 8});
         p.page_table = Buffer(DType::i32, {2, 1});
         p.page_table.set_values(std::vector<double>{1, 4});
       }},
      {"v_cache: expected both v and v_cache, or neither, got only v",
       [](Problem& p) {
         p.k_cache = Buffer(DType::f32, {2, 1, 5, 8});
         p.v = Buffer(DType::f32, {2, 1, 3, 8});
       }},
      {"k: expected an input to rotate, got none", [](Problem& p) { p.k = {}; }},
      {"q: expected both an input and an output, or neither, got only an input",
       [](Problem& p) { p.out_q = {}; }},
      {"output q: expected memory that does not overlap k, got an overlap",
       [](Problem& p) { p.k = p.out_q; }},
  };
  for (const Mistake& mistake : mistakes) {
    SeededRandom random(6);
    Problem p;
    p.q = random_buffer(random, DType::f32, {2, 1, 3, 8});
    p.k = random_buffer(random, DType::f32, {2, 1, 3, 8});
    p.cos = random_buffer(random, DType::f32, {9, 4});
    p.sin = random_buffer(random, DType::f32, {9, 4});
    p.out_q = Buffer(DType::f32, {2, 1, 3, 8});
    p.out_k = Buffer(DType::f32, {2, 1, 3, 8});
    mistake.make(p);
    const std::vector<std::byte> before = p.out_k.bytes();
    EXPECT_EQ(thrown<InvalidArgument>([&] { run(p); }), mistake.text);
    EXPECT_EQ(before, p.out_k.bytes());
  }
}

}  // namespace
}  // namespace tilewise::test::rope_test
