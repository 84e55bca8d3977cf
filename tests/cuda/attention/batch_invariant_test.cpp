#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "attention/kernel.h"
#include "attention/validate.h"
#include "cuda/attention/device_problem.h"
#include "support/batches.h"

// What `batch_invariant` promises, on a CUDA device: the same choices for every batch, and the same bits.
namespace tilewise::test::batch_invariant_test {
namespace {

const Place cuda_place{[](const auto& inputs, const auto& options, const auto& outputs) {
                         run_forward_on_cuda(inputs, options, outputs);
                       },
                       [](const auto& inputs, const auto& options, const auto& gradients) {
                         run_backward_on_cuda(inputs, options, gradients);
                       }};

// The others in a batch, much larger, so that their scores would raise the maxima of rows they share a warp
// with.
SequenceOf other(std::uint64_t seed, std::int64_t length_q, std::int64_t length_k) {
  return {.seed = seed, .length_q = length_q, .length_k = length_k, .size = 6};
}

struct Case {
  std::string name;
  Kind kind;
  SequenceOf one;
  std::vector<Form> forms;  ///< in all of which the bits are the same
};

Kind kind_of(DType dtype, std::string_view kernel, std::int64_t dim) {
  Kind kind{.dtype = dtype, .dim_qk = dim, .dim_v = dim};
  kind.options.batch_invariant = true;
  kind.options.kernel = kernel;
  return kind;
}

// Batches with the sequence at `place`. Only packed ones may have other numbers of queries.
std::vector<std::pair<Batch, std::size_t>> batches_with(const SequenceOf& one, Form form) {
  const bool packed = form == Form::packed, same_keys = form == Form::dense;
  const std::int64_t few_q = packed ? 3 : one.length_q, many_q = packed ? 140 : one.length_q;
  const std::int64_t few_k = same_keys ? one.length_k : 5, many_k = same_keys ? one.length_k : 290;
  return {{{.form = form, .sequences = {one}}, 0},
          {{.form = form, .sequences = {one, other(7, many_q, many_k)}}, 0},
          {{.form = form,
            .sequences = {other(8, few_q, few_k), other(9, many_q, many_k), one, other(10, few_q, many_k)},
            .capacity = 600,
            .page = 32},
           2}};
}

// Why the device has no such kernel at all. A kernel that only refuses batch_invariant fails the test.
std::string reason_on_device(const Kind& kind) {
  RandomProblem problem = dense_problem(1, kind.dtype,
                                        {.b = 1,
                                         .hq = kind.heads_q,
                                         .hkv = kind.heads_kv,
                                         .sq = 70,
                                         .sk = 190,
                                         .d = kind.dim_qk,
                                         .dv = kind.dim_v});
  problem.options = kind.options;
  problem.options.batch_invariant = false;
  return reason_against(problem, std::string(kind.options.kernel));
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const SequenceOf usual{.seed = 1, .length_q = 70, .length_k = 190};
  const SequenceOf newest{.seed = 2, .length_q = 1, .length_k = 190};
  const std::vector<Form> whole = {Form::dense, Form::packed};
  const auto add = [&](const std::string& name, const Kind& kind, const SequenceOf& one,
                       const std::vector<Form>& forms) { all.push_back({name, kind, one, forms}); };
  for (const auto& [kernel, dtype] : {std::pair("wgmma", DType::bf16), std::pair("wgmma", DType::f16),
                                      std::pair("mma", DType::bf16), std::pair("fused", DType::f32)}) {
    const std::string of = std::string(kernel) + "_" + std::string(to_string(dtype));
    const bool f16 = dtype == DType::f16;
    Kind kind = kind_of(dtype, kernel, f16 ? 128 : 64);
    add(of, kind, usual, whole);
    kind.options.causal = true;
    kind.options.alignment = Alignment::bottom_right;
    kind.sinks = true;
    add(of + "_causal_sinks", kind, usual, whole);
    if (f16) continue;
    kind.alibi = true;
    kind.options.softcap = 5;
    kind.options.window = {40, std::nullopt};
    add(of + "_features", kind, usual, whole);
    kind = kind_of(dtype, kernel, 64);
    kind.mask = true;
    add(of + "_mask", kind, {.seed = 3, .length_q = 70, .length_k = 192}, {Form::dense});
    kind.mask = false;
    kind.options.alignment = Alignment::bottom_right;
    kind.options.causal = true;
    add(of + "_one_query", kind, newest, whole);
    add(of + "_cache", kind, usual, {Form::cache});
    if (std::string(kernel) == "wgmma") continue;  // one query of a cache, and pages, are not for it
    kind.backward = false;
    add(of + "_decode", kind, newest, {Form::cache});
    add(of + "_pages", kind, newest, {Form::paged});
    add(of + "_prefill_of_pages", kind, usual, {Form::paged});
    kind.options.softcap = 5;
    add(of + "_pages_softcap", kind, newest, {Form::paged});
  }
  for (const std::string_view kernel : {"wgmma", "mma"}) {
    Kind kind = kind_of(DType::bf16, kernel, 256);
    kind.options.causal = true;
    add(std::string(kernel) + "_256_dims", kind, usual, whole);
    kind.dim_qk = 192;
    kind.dim_v = 128;
    kind.heads_q = 6;
    add(std::string(kernel) + "_six_heads", kind, {.seed = 5, .length_q = 129, .length_k = 257}, whole);
  }
  Kind f16 = kind_of(DType::f16, "mma", 64);
  f16.backward = false;  // of which only wgmma's is batch_invariant
  add("mma_f16_forward", f16, usual, whole);
  add("auto_f16", kind_of(DType::f16, "auto", 40), usual, whole);
  Kind wide = kind_of(DType::f32, "auto", 144);
  wide.heads_q = 2;
  wide.heads_kv = 1;
  add("auto_f32_wide_heads", wide, {.seed = 4, .length_q = 30, .length_k = 70}, whole);
  Kind strict = kind_of(DType::bf16, "auto", 64);
  strict.options.precision = Precision::strict;
  add("auto_bf16_strict", strict, usual, whole);
  return all;
}

void PrintTo(const Case& own, std::ostream* to) { *to << own.name; }
std::string case_name(const testing::TestParamInfo<Case>& info) { return info.param.name; }

class BatchInvariantOnCuda : public CudaTest, public testing::WithParamInterface<Case> {};

TEST_P(BatchInvariantOnCuda, ASequenceHasTheSameBitsInEveryBatch) {
  const Case& own = GetParam();
  if (own.kind.options.kernel != "auto") {
    if (const std::string reason = reason_on_device(own.kind); !reason.empty()) GTEST_SKIP() << reason;
  }
  std::vector<SequenceBits> first;
  for (const Form form : own.forms) {
    for (const auto& [batch, place] : batches_with(own.one, form)) {
      SequenceBits bits = run_batch(batch, own.kind, cuda_place)[place];
      if (first.empty()) {
        first.push_back(std::move(bits));
      } else {
        EXPECT_EQ(bits.difference(first[0]), "")
            << to_string(form) << ", " << batch.sequences.size() << " sequences, at " << place;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, BatchInvariantOnCuda, testing::ValuesIn(cases()), case_name);

// Random kinds of calls, by the kernels that "auto" chooses.
void expect_same_in_random_batches(std::uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random rng(seed);
  Kind kind = random_kind(rng);
  const SequenceOf one{.seed = seed, .length_q = random_length(rng), .length_k = random_length(rng)};
  const Form form = rng.pick({Form::dense, Form::cache, Form::paged, Form::packed});
  SCOPED_TRACE(to_string(form));
  if (form == Form::dense) kind.mask = rng.chance(0.3);
  std::size_t place;
  const Batch batch = among_others(rng, form, one, place);
  const SequenceBits alone =
      run_batch({.form = form, .sequences = {one}, .page = batch.page}, kind, cuda_place)[0];
  EXPECT_EQ(run_batch(batch, kind, cuda_place)[place].difference(alone), "")
      << batch.sequences.size() << " sequences, at " << place;
  if (form != Form::packed) return;
  EXPECT_EQ(run_batch({.sequences = {one}}, kind, cuda_place)[0].difference(alone), "") << "dense";
}

using BatchInvariantRandom = CudaTest;

TEST_F(BatchInvariantRandom, ASequenceHasTheSameBitsAloneAndAmongOthers) {
#ifdef TILEWISE_EMULATOR
  constexpr std::uint64_t count = 8;
#else
  constexpr std::uint64_t count = 400;
#endif
  for (std::uint64_t seed = 1; seed <= count; ++seed) expect_same_in_random_batches(seed);
}

// The choice itself: kernel, row of its tuning table, packed heads and splits.

struct CallSizes {
  std::int64_t batch, queries, keys;
};

// A call whose tensors have no data: choosing reads none.
class Chosen {
 public:
  std::string_view kernel;
  Configuration configuration;
  std::int64_t bytes_per_row;  ///< of workspace

  bool operator==(const Chosen& other) const {
    return kernel == other.kernel && configuration.row == other.configuration.row &&
           configuration.heads_log2 == other.configuration.heads_log2 &&
           configuration.splits == other.configuration.splits && bytes_per_row == other.bytes_per_row;
  }
};

Chosen choose(Form form, DType dtype, const CallSizes& n, bool batch_invariant, Pass pass = Pass::forward) {
  constexpr std::int64_t heads = 8, heads_kv = 2, dim = 128, page = 64;
  const auto memory = [](DType of, std::initializer_list<std::int64_t> shape) {
    static std::int64_t next = 1;
    auto* data = reinterpret_cast<std::byte*>(next++ << 40);
    return Tensor(data, of, shape, first_device);
  };
  const bool packed = form == Form::packed;
  const auto rows = [&](std::int64_t count, std::int64_t length) {
    return packed ? memory(dtype, {n.batch * length, count, dim})
                  : memory(dtype, {n.batch, count, length, dim});
  };
  AttentionInputs inputs{
      .q = rows(heads, n.queries), .k = rows(heads_kv, n.keys), .v = rows(heads_kv, n.keys)};
  if (form == Form::cache || form == Form::paged) inputs.key_lengths = memory(DType::i32, {n.batch});
  if (form == Form::paged) {
    inputs.k = memory(dtype, {n.batch * n.keys / page, heads_kv, page, dim});
    inputs.v = memory(dtype, {n.batch * n.keys / page, heads_kv, page, dim});
    inputs.page_table = memory(DType::i32, {n.batch, n.keys / page});
  }
  if (packed) {
    inputs.packed = {.cumulative_q = memory(DType::i32, {n.batch + 1}),
                     .cumulative_k = memory(DType::i32, {n.batch + 1}),
                     .max_length_q = n.queries,
                     .max_length_k = n.keys};
  }
  const AttentionOptions options{
      .causal = true, .alignment = Alignment::bottom_right, .batch_invariant = batch_invariant};
  const Context context{.device = first_device};
  const Tensor o = rows(heads, n.queries), lse = packed ? memory(DType::f32, {heads, n.batch * n.queries})
                                                        : memory(DType::f32, {n.batch, heads, n.queries});
  const AttentionCall call = pass == Pass::forward
                                 ? checked_forward(inputs, options, {.o = o, .lse = lse}, context)
                                 : checked_backward(inputs, options,
                                                    {.o = o,
                                                     .lse = lse,
                                                     .d_o = rows(heads, n.queries),
                                                     .dq = rows(heads, n.queries),
                                                     .dk = rows(heads_kv, n.keys),
                                                     .dv = rows(heads_kv, n.keys)},
                                                    context);
  const AttentionKernel& kernel = choose_attention_kernel(call.problem, "auto");
  const Configuration found = configure_kernel(kernel, call, context);
  // Splits of mma are not in the configuration, but have a part of the workspace for each row.
  const bool counts = kernel.name == "mma" && pass == Pass::forward;
  const auto bytes = counts ? static_cast<std::int64_t>(found.workspace_bytes) / (n.batch * n.queries) : 0;
  return {kernel.name, found, bytes};
}

using BatchInvariantChoice = CudaTest;
using BatchInvariantChoiceOn80 = CudaKernelFixture<80>;  // older GPUs have `fused` alone

TEST_F(BatchInvariantChoice, IsThatOfOneSequence) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const Form form : {Form::dense, Form::packed, Form::cache, Form::paged}) {
      for (const std::int64_t queries : {1, 3, 40, 1000}) {
        SCOPED_TRACE(std::string(to_string(dtype)) + ", " + to_string(form) + ", " + std::to_string(queries));
        const Chosen one = choose(form, dtype, {1, queries, 4096}, true);
        for (const std::int64_t batch : {2, 7, 64, 300}) {
          EXPECT_EQ(choose(form, dtype, {batch, queries, 4096}, true), one) << batch;
        }
        EXPECT_EQ(choose(form, dtype, {3, queries, 128}, true), one);
      }
    }
  }
}

TEST_F(BatchInvariantChoice, IsThatOfAnyLengthsWherePacked) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      const Chosen one = choose(Form::dense, dtype, {1, 1, 2}, true, pass);
      for (const CallSizes& n : {CallSizes{1, 5000, 5000}, CallSizes{64, 17, 90}, CallSizes{9, 1, 3000}}) {
        EXPECT_EQ(choose(Form::packed, dtype, n, true, pass), one);
        EXPECT_EQ(choose(Form::dense, dtype, n, true, pass), one);
      }
    }
  }
}

// Or the tests of bits would say nothing of splits.
TEST_F(BatchInvariantChoiceOn80, SplitsTheKeysOfCaches) {
  EXPECT_GT(choose(Form::paged, DType::bf16, {30, 1, 4096}, true).bytes_per_row, 0);
  EXPECT_GT(choose(Form::cache, DType::bf16, {30, 1, 4096}, true).bytes_per_row, 0);
  const Chosen many = choose(Form::cache, DType::bf16, {30, 40, 4096}, true);
  EXPECT_TRUE(many.kernel != "wgmma" || many.configuration.splits > 1);
}

TEST_F(BatchInvariantChoice, IsExplained) {
  RandomProblem problem = dense_problem(1, DType::bf16, {.sq = 600, .sk = 600, .d = 64, .dv = 64});
  problem.options.batch_invariant = true;
  const std::string text = to_string(explanation_of(problem, "auto", Pass::forward));
  EXPECT_NE(text.find("chosen, batch_invariant: as for forward bf16 dense B64"), std::string::npos) << text;
}

TEST_F(BatchInvariantChoiceOn80, IsNotThatOfACallWithoutIt) {
  const Chosen one = choose(Form::paged, DType::bf16, {1, 1, 8192}, false);
  EXPECT_FALSE(choose(Form::paged, DType::bf16, {64, 1, 8192}, false) == one);
}

TEST_F(BatchInvariantChoiceOn80, IsRefusedByKernelsThatDependOnTheBatch) {
  for (const auto& [kernel, dtype] : {std::pair("wide", DType::bf16), std::pair("mma", DType::f32),
                                      std::pair("tiled", DType::f32), std::pair("naive", DType::f32)}) {
    RandomProblem problem = dense_problem(1, dtype, {.sq = 600, .sk = 600, .d = 320, .dv = 320});
    if (std::string(kernel) == "mma")
      problem = dense_problem(1, dtype, {.sq = 600, .sk = 600, .d = 64, .dv = 64});
    problem.options.batch_invariant = true;
    EXPECT_NE(reason_against(problem, kernel), "") << kernel;
    problem.options.batch_invariant = false;
    EXPECT_EQ(reason_against(problem, kernel), "") << kernel;
  }
}

}  // namespace
}  // namespace tilewise::test::batch_invariant_test
