#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/device_tensors.h"
#include "cuda/runtime/device.h"
#include "support/random_problem.h"
#include "tilewise/plan.h"

namespace tilewise::test {

struct Sizes {
  std::int64_t b = 2, hq = 4, hkv = 2, sq = 70, sk = 131, d = 40, dv = 24;
};

/// Sizes that a kernel takes in all its types, and where it has a backward, both passes: small, and of no
/// full tiles.
inline Sizes sizes_for(const std::string& kernel) {
  if (kernel == "wide") return {.b = 2, .hq = 2, .hkv = 1, .sq = 130, .sk = 430, .d = 320, .dv = 288};
  // Keys are a multiple of 4: rows of a mask in f32 are aligned.
  if (kernel == "mma" || kernel == "wgmma") return {.sq = 130, .sk = 132, .d = 40, .dv = 64};
  return {};
}

/// Dense, of random numbers, and with no features.
inline RandomProblem dense_problem(std::uint64_t seed, DType dtype, const Sizes& n = {}) {
  Random rng(seed);
  RandomProblem p;
  p.seed = seed;
  p.dtype = dtype;
  p.batch = n.b;
  p.heads_q = n.hq;
  p.heads_kv = n.hkv;
  p.length_q = n.sq;
  p.length_k = n.sk;
  p.dim_qk = n.d;
  p.dim_v = n.dv;
  p.aligned_results = true;
  p.q = Buffer(dtype, {n.b, n.hq, n.sq, n.d});
  p.k = Buffer(dtype, {n.b, n.hkv, n.sk, n.d});
  p.v = Buffer(dtype, {n.b, n.hkv, n.sk, n.dv});
  p.d_o = Buffer(dtype, {n.b, n.hq, n.sq, n.dv});
  for (Buffer* buffer : {&p.q, &p.k, &p.v, &p.d_o}) buffer->fill_random(rng);
  return p;
}

/// The same with what changes scores and weights: causal, sinks, dropout and a mask that has a gradient.
inline RandomProblem featured_problem(std::uint64_t seed, DType dtype, const Sizes& n = {}) {
  RandomProblem p = dense_problem(seed, dtype, n);
  Random rng(seed + 1);
  p.d_lse = Buffer(DType::f32, {n.b, n.hq, n.sq});
  p.mask = Buffer(DType::f32, {n.b, 1, n.sq, n.sk});
  p.sinks = Buffer(DType::f32, {n.hq});
  for (Buffer* buffer : {&p.d_lse, &p.mask, &p.sinks}) buffer->fill_random(rng);
  p.options.causal = true;
  p.options.alignment = Alignment::bottom_right;
  p.options.dropout = {.probability = 0.2f, .seed = seed};
  p.asked.dmask = true;
  p.asked.dsinks = true;
  return p;
}

/// Padding of [B, Sk]: entries show their first keys, their last ones, a few in between, all of them, or
/// none.
inline Buffer padding_of(std::uint64_t seed, std::int64_t batch, std::int64_t keys) {
  Buffer shown(DType::boolean, {batch, keys});
  Random rng(seed);
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t kind = (b + static_cast<std::int64_t>(seed)) % 5;
    const std::int64_t cut = rng.between(1, keys);
    for (std::int64_t j = 0; j < keys; ++j) {
      const bool shows[] = {j < cut, j >= keys - cut, rng.chance(0.05), true, false};
      shown.set({b, j}, shows[kind] ? 1 : 0);
    }
  }
  return shown;
}
/// The same as a mask for all heads and queries.
inline Buffer padding_mask_of(std::uint64_t seed, std::int64_t batch, std::int64_t keys) {
  const Buffer shown = padding_of(seed, batch, keys);
  Buffer mask(DType::boolean, {batch, 1, 1, keys});
  mask.set_values(shown.values());
  return mask;
}
/// The same as a block mask of one block for each entry, beside which there may be another mask.
inline RandomBlocks padding_blocks_of(std::uint64_t seed, const RandomProblem& p) {
  RandomBlocks blocks;
  blocks.block_q = p.length_q;
  blocks.block_k = p.length_k;
  blocks.counts = Buffer(DType::i32, {p.batch, 1, 1});
  blocks.indices = Buffer(DType::i32, {p.batch, 1, 1, 1});
  blocks.tile_ids = Buffer(DType::i32, {p.batch, 1, 1, 1});
  blocks.tiles = Buffer(DType::boolean, {p.batch, p.length_q, p.length_k}, {.expanded = {1}});
  const Buffer shown = padding_of(seed, p.batch, p.length_k);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    blocks.counts.set({b, 0, 0}, 1);
    blocks.indices.set({b, 0, 0, 0}, 0);
    blocks.tile_ids.set({b, 0, 0, 0}, static_cast<double>(b));
    for (std::int64_t j = 0; j < p.length_k; ++j) blocks.tiles.set({b, 0, j}, shown.at(b, j));
  }
  return blocks;
}

inline AttentionGradients backward_arguments(const RandomProblem& problem, const OutputBuffers& outputs,
                                             const GradientBuffers& gradients) {
  return {.o = outputs.o.view(),
          .lse = outputs.lse.view(),
          .d_o = problem.d_o.view(),
          .d_lse = problem.d_lse.view(),
          .dq = gradients.dq.view(),
          .dk = gradients.dk.view(),
          .dv = gradients.dv.view(),
          .dmask = gradients.dmask.view(),
          .dsinks = gradients.dsinks.view(),
          .dlogit_scale = gradients.dlogit_scale.view()};
}

/// The kernels of the library that may run on CUDA devices, as parameters of tests. `widened` is for strict
/// precision, other names of wgmma's and of wide's are on trial: they have tests of their own.
inline std::vector<std::string> cuda_kernels() {
  std::vector<std::string> names;
  for (const std::string_view name : attention_kernels()) {
    const bool apart = name == "widened" || name.starts_with("wgmma_") || name.starts_with("wide_");
    if (name != "simd" && name != "reference" && !apart) names.emplace_back(name);
  }
  return names;
}

inline std::string kernel_name(const testing::TestParamInfo<std::string>& info) { return info.param; }

/// What is said of each kernel, where the caller asks for one of them or for "auto" on a CUDA device.
inline Explanation explanation_of(const RandomProblem& problem, const std::string& kernel, Pass pass) {
  const OutputBuffers outputs = make_outputs(problem);
  const GradientBuffers gradients = make_gradients(problem);
  const AttentionInputs inputs = on_device(problem.inputs(), first_device);
  const Context context{.device = first_device};
  AttentionOptions options = problem.options;
  options.kernel = kernel;
  return pass == Pass::forward
             ? explain_attention_forward(inputs, options, on_device(outputs.view(), first_device), context)
             : explain_attention_backward(
                   inputs, options, on_device(backward_arguments(problem, outputs, gradients), first_device),
                   context);
}

/// Why a kernel cannot take a pass of a problem on a CUDA device; empty where it can.
inline std::string reason_against(const RandomProblem& problem, const std::string& kernel,
                                  Pass pass = Pass::forward) {
  for (const Explanation::Entry& entry : explanation_of(problem, kernel, pass).entries) {
    if (entry.kernel == kernel && entry.verdict == Explanation::Verdict::unable) return entry.reason;
  }
  return {};
}

/// The kernel that "auto" takes.
inline std::string chosen_kernel(const RandomProblem& problem, Pass pass) {
  for (const Explanation::Entry& entry : explanation_of(problem, "auto", pass).entries) {
    if (entry.verdict == Explanation::Verdict::chosen) return entry.kernel;
  }
  return {};
}

/// A problem with the features that the kernel takes, or without any where it takes none in that type.
inline RandomProblem suited_problem(const std::string& kernel, std::uint64_t seed, DType dtype,
                                    const Sizes& n) {
  RandomProblem problem = featured_problem(seed, dtype, n);
  if (kernel == "wide") problem.asked.dmask = false;
  if (kernel == "wgmma") {  // with a mask and dropout
    problem.sinks = {};
    problem.asked.dsinks = false;
  }
  return reason_against(problem, kernel).empty() ? std::move(problem) : dense_problem(seed, dtype, n);
}
inline RandomProblem suited_problem(const std::string& kernel, std::uint64_t seed, DType dtype) {
  return suited_problem(kernel, seed, dtype, sizes_for(kernel));
}

/// The types a kernel takes; none where this device cannot run it.
inline std::vector<DType> types_of(const std::string& kernel) {
  std::vector<DType> types;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    if (reason_against(dense_problem(1, dtype, sizes_for(kernel)), kernel).empty()) types.push_back(dtype);
  }
  return types;
}

/// For the truth, which takes most of a test's time.
inline int all_cores() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

/// Tests of one kernel. Only the compute capability may skip them: where the device is what the kernel is
/// for, a refusal is a failure.
template <int least, int most = 1000>
class CudaKernelFixture : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    const int own = cuda::device_properties(first_device.index).compute_capability;
    if (own < least || own > most) GTEST_SKIP() << "not for compute capability " << own / 10.0;
  }
};

/// Tests that run once a kernel, where the device can run it.
class CudaKernelTest : public CudaTest, public testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    types = types_of(GetParam());
    if (types.empty()) {
      GTEST_SKIP() << reason_against(dense_problem(1, DType::bf16, sizes_for(GetParam())), GetParam());
    }
  }

  std::vector<DType> types;  ///< that the kernel takes
};

/// Whether backward gives the same bits again.
enum class Bits { same, any };

inline RandomProblem with_bits(RandomProblem problem, Bits bits) {
  problem.options.deterministic = bits == Bits::same;
  return problem;
}

/// Both passes of one kernel on a problem whose tensors are all on the device, or forward alone where it has
/// no more. Backward reads what forward wrote.
class DeviceProblem {
 public:
  DeviceProblem(const RandomProblem& problem, std::string kernel, Bits bits = Bits::same)
      : kernel_(std::move(kernel)),
        has_backward_(reason_against(with_bits(problem, bits), kernel_, Pass::backward).empty()),
        inputs_(problem.inputs()),
        options_(with_bits(problem, bits).options) {
    const OutputBuffers outputs = make_outputs(problem);
    const GradientBuffers gradients = make_gradients(problem);
    outputs_ = outputs.view();
    gradients_ = backward_arguments(problem, outputs, gradients);
    move_to_device(tensors_of(inputs_), data_);
    move_to_device({&gradients_.d_o, &gradients_.d_lse}, data_);
    move_to_device(tensors_of(outputs_), results_);
    move_to_device(written_by(gradients_), results_);
    gradients_.o = outputs_.o;
    gradients_.lse = outputs_.lse;
    const Context context{.device = first_device};
    workspace_ = std::make_unique<DeviceMemory>(
        std::max(attention_forward_workspace(inputs_, options(), outputs_, context),
                 has_backward_ ? attention_backward_workspace(inputs_, options(), gradients_, context)
                               : std::size_t{0}));
  }

  /// The data of another problem of the same shapes and options, at the same addresses.
  void upload(const RandomProblem& problem) const {
    AttentionInputs inputs = problem.inputs();
    std::vector<Tensor*> tensors = tensors_of(inputs);
    Tensor d_o = problem.d_o.view();
    Tensor d_lse = problem.d_lse.view();
    tensors.insert(tensors.end(), {&d_o, &d_lse});
    auto place = data_.begin();
    for (const Tensor* tensor : tensors) {
      if (tensor->given()) (place++)->upload(*tensor);
    }
  }

  void forward(cudaStream_t stream) const {
    attention_forward(inputs_, options(), outputs_, context(stream));
  }
  void backward(cudaStream_t stream) const {
    if (has_backward_) attention_backward(inputs_, options(), gradients_, context(stream));
  }

  AttentionPlan forward_plan() const {
    return plan_attention_forward(inputs_, options(), outputs_, context(nullptr));
  }
  std::optional<AttentionBackwardPlan> backward_plan() const {
    if (!has_backward_) return {};
    return plan_attention_backward(inputs_, options(), gradients_, context(nullptr));
  }
  /// Both passes by plans, which may be those of another problem of the same shapes and options.
  void run(const AttentionPlan& forward, const std::optional<AttentionBackwardPlan>& backward,
           cudaStream_t stream) const {
    forward.run(inputs_, outputs_, context(stream));
    if (backward) backward->run(inputs_, gradients_, context(stream));
  }

  /// Poisons the results and the workspace.
  void poison(cudaStream_t stream) const {
    for (const DeviceTensor& result : results_) result.poison(stream);
    workspace_->fill(0xFF, stream);
  }
  /// o, lse and, where there is a backward, all gradients. The caller has waited for them.
  std::vector<std::byte> results() const {
    AttentionOutputs outputs = outputs_;
    return bytes_of(has_backward_ ? results_.size() : given_of(tensors_of(outputs)));
  }
  /// o and lse.
  std::vector<std::byte> outputs() const {
    AttentionOutputs outputs = outputs_;
    return bytes_of(given_of(tensors_of(outputs)));
  }
  /// The same to host tensors of a problem of the same shapes.
  void download(AttentionOutputs outputs) const { download(tensors_of(outputs), 0); }
  void download(AttentionGradients gradients) const {
    AttentionOutputs outputs = outputs_;
    download(written_by(gradients), given_of(tensors_of(outputs)));
  }
  /// Both passes from poisoned results to the end.
  std::vector<std::byte> run(const Stream& stream) const {
    poison(stream);
    forward(stream);
    backward(stream);
    stream.wait();
    return results();
  }

 private:
  /// Of the first so many results.
  std::vector<std::byte> bytes_of(std::size_t count) const {
    std::vector<std::byte> all;
    for (std::size_t n = 0; n < count; ++n) {
      const std::vector<std::byte> bytes = results_[n].bytes();
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
  static std::size_t given_of(const std::vector<Tensor*>& tensors) {
    return static_cast<std::size_t>(
        std::count_if(tensors.begin(), tensors.end(), [](const Tensor* tensor) { return tensor->given(); }));
  }
  void download(const std::vector<Tensor*>& tensors, std::size_t first) const {
    for (const Tensor* tensor : tensors) {
      if (tensor->given()) results_.at(first++).download(*tensor);
    }
  }

  AttentionOptions options() const {
    AttentionOptions options = options_;
    options.kernel = kernel_;
    return options;
  }
  Context context(cudaStream_t stream) const {
    return {.device = first_device, .stream = stream, .workspace = {workspace_->data(), workspace_->bytes()}};
  }

  std::string kernel_;
  bool has_backward_;
  AttentionInputs inputs_;
  AttentionOptions options_;
  AttentionOutputs outputs_;
  AttentionGradients gradients_;
  std::deque<DeviceTensor> data_, results_;
  std::unique_ptr<DeviceMemory> workspace_;
};

}  // namespace tilewise::test
