#include "layer/plain.h"

namespace tilewise::test {
namespace {

struct Problem {
  Buffer q, k, v, cos, sin, positions, cache_starts, page_table;
  Buffer out_q, out_k, k_cache, v_cache;
  RopeOptions options;

  RopeInputs inputs() const {
    return {
        q.view(),         k.view(), v.view(), cos.view(), sin.view(), positions.view(), cache_starts.view(),
        page_table.view()};
  }
  RopeOutputs outputs() const { return {out_q.view(), out_k.view(), k_cache.view(), v_cache.view()}; }
};

struct Sizes {
  std::int64_t batch, heads_q, heads_kv, length, dim, rotary, dim_v;
};

void run(const Problem& p, Context context = serial_context()) {
  with_workspace(rope_workspace(p.inputs(), p.options, p.outputs(), context), [&](Workspace workspace) {
    context.workspace = workspace;
    rope(p.inputs(), p.options, p.outputs(), context);
  });
}

// Heads inside or outside of positions.
Placement heads_placement(Random& random) {
  Placement placement;
  if (random.chance(0.5)) placement.order = {0, 2, 1, 3};
  if (random.chance(0.3)) placement.padding = {0, 0, 0, random.between(1, 7)};
  return placement;
}

constexpr std::int64_t table_rows = 50;

Problem random_problem(Random& random, const Sizes& n, DType dtype) {
  Problem p;
  p.q = random_buffer(random, dtype, {n.batch, n.heads_q, n.length, n.dim}, 1, heads_placement(random));
  p.k = random_buffer(random, dtype, {n.batch, n.heads_kv, n.length, n.dim}, 1, heads_placement(random));
  p.out_q = Buffer(dtype, p.q.shape(), heads_placement(random));
  p.out_k = Buffer(dtype, p.k.shape(), heads_placement(random));
  p.out_q.poison();
  p.out_k.poison();
  const DType angles = random.chance(0.3) ? dtype : DType::f32;
  const bool of_tokens = random.chance(0.3);
  const Shape shape = of_tokens ? Shape{random.chance(0.5) ? 1 : n.batch, n.length, n.rotary / 2}
                                : Shape{table_rows, n.rotary / 2};
  p.cos = Buffer(angles, shape, random.chance(0.3) ? Placement{.padding = {0, 3}} : Placement());
  p.sin = Buffer(angles, shape);
  std::vector<double> cos(static_cast<std::size_t>(p.cos.size())), sin = cos;
  for (std::size_t i = 0; i < cos.size(); ++i) {
    const double angle = random.uniform(-4, 4);
    cos[i] = std::cos(angle);
    sin[i] = std::sin(angle);
  }
  p.cos.set_values(cos);
  p.sin.set_values(sin);
  if (!of_tokens && random.chance(0.6)) {
    p.positions =
        Buffer(random.chance(0.5) ? DType::i32 : DType::i64, {random.chance(0.5) ? 1 : n.batch, n.length});
    std::vector<double> rows(static_cast<std::size_t>(p.positions.size()));
    for (double& row : rows) row = static_cast<double>(random.between(0, table_rows - 1));
    p.positions.set_values(rows);
  }
  p.options.pairs = random.pick({RopePairs::halves, RopePairs::interleaved});
  p.options.inverse = random.chance(0.3);
  return p;
}

void add_cache(Problem& p, Random& random, const Sizes& n, bool paged) {
  const DType dtype = p.q.dtype();
  p.v = random_buffer(random, dtype, {n.batch, n.heads_kv, n.length, n.dim_v}, 1, heads_placement(random));
  std::vector<double> starts(static_cast<std::size_t>(n.batch));
  for (double& start : starts) start = static_cast<double>(random.between(0, 5));
  p.cache_starts = Buffer(DType::i32, {n.batch});
  p.cache_starts.set_values(starts);
  const std::int64_t capacity = n.length + 5;
  if (paged) {
    constexpr std::int64_t page = 3;
    const std::int64_t pages = (capacity + page - 1) / page;
    std::vector<double> table(static_cast<std::size_t>(n.batch * pages));
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<double>(i);
    random.shuffle(table);
    p.page_table = Buffer(DType::i32, {n.batch, pages});
    p.page_table.set_values(table);
    p.k_cache = random_buffer(random, dtype, {n.batch * pages, n.heads_kv, page, n.dim});
    p.v_cache = random_buffer(random, dtype, {n.batch * pages, n.heads_kv, page, n.dim_v});
  } else {
    p.k_cache = random_buffer(random, dtype, {n.batch, n.heads_kv, capacity, n.dim});
    p.v_cache = random_buffer(random, dtype, {n.batch, n.heads_kv, capacity, n.dim_v});
  }
  if (random.chance(0.5)) p.out_k = {};
}

Problem exact_problem(const Problem& p) {
  Problem e = p;
  for (const auto member : {&Problem::q, &Problem::k, &Problem::v, &Problem::cos, &Problem::sin,
                            &Problem::out_q, &Problem::out_k, &Problem::k_cache, &Problem::v_cache}) {
    e.*member = exact(p.*member);
  }
  e.options.kernel = "reference";
  return e;
}

// As a framework turns: products and their sum in f32, and rounded.
Plain flat(const Buffer& buffer) {
  Plain plain(buffer.dtype(), 1, buffer.size());
  plain.values = buffer.values();
  return plain;
}

void check(Problem& p, const Context& context) {
  const Problem e = exact_problem(p);
  run(e);
  run(p, context);
  // A turn is two products and a sum, as near as rounding the truth.
  for (const auto member : {&Problem::out_q, &Problem::out_k, &Problem::k_cache, &Problem::v_cache}) {
    const Buffer& got = p.*member;
    if (!got.given()) continue;
    Buffer rounded(got.dtype(), got.shape());
    rounded.set_values((e.*member).values());
    expect_near(got, (e.*member).values(), flat(rounded), "output", 4);
  }
}

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
      {"cos: expected at most half the head dim 8, got f32[9, 5]",
       [](Problem& p) { p.cos = p.sin = Buffer(DType::f32, {9, 5}); }},
      {"cos: expected a table of at least 3 positions, got f32[2, 4]",
       [](Problem& p) { p.cos = p.sin = Buffer(DType::f32, {2, 4}); }},
      {"sin: expected the shape of cos, [9, 4], got f32[9, 3]",
       [](Problem& p) { p.sin = Buffer(DType::f32, {9, 3}); }},
      {"positions: expected i32 or i64, got f32",
       [](Problem& p) { p.positions = Buffer(DType::f32, {2, 3}); }},
      {"positions: expected positions from 0 to 8, got 9",
       [](Problem& p) {
         p.positions = Buffer(DType::i64, {1, 3});
         p.positions.set_values(std::vector<double>{0, 9, 1});
       }},
      {"k_cache: expected room for 3 tokens from 0 on, got a cache of 2 for entry 0",
       [](Problem& p) { p.k_cache = Buffer(DType::f32, {2, 1, 2, 8}); }},
      {"page_table: expected none without a cache, got i32[2, 1]",
       [](Problem& p) { p.page_table = Buffer(DType::i32, {2, 1}); }},
      {"page_table: expected pages from 0 to 3, got 4",
       [](Problem& p) {
         p.k_cache = Buffer(DType::f32, {4, 1, 3, 8});
         p.page_table = Buffer(DType::i32, {2, 1});
         p.page_table.set_values(std::vector<double>{1, 4});
       }},
      {"v_cache: expected both v and v_cache, or neither, got v alone",
       [](Problem& p) {
         p.k_cache = Buffer(DType::f32, {2, 1, 5, 8});
         p.v = Buffer(DType::f32, {2, 1, 3, 8});
       }},
      {"q: expected both an input and an output, or neither, got an input alone",
       [](Problem& p) { p.out_q = {}; }},
      {"output q: expected memory apart from k, got an overlap", [](Problem& p) { p.k = p.out_q; }},
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
}  // namespace tilewise::test
