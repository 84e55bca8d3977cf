#include <limits>
#include <string>

#include "core/reasons.h"
#include "cpu/simd/levels.h"
#include "ffn/steps.h"
#include "gemm/kernel.h"
#include "norm/kernel.h"
#include "rope/kernel.h"

// The CPU kernels of the operations around attention: gemm, norm, rope and the steps of the feed-forward
// network.

namespace tilewise::cpu {
namespace simd {
namespace {

std::string supports_device(Device device, DType dtype) {
  if (device.type != Device::Type::cpu) return "runs on the CPU only";
  if (!has_level()) return "this CPU has none of the vector instruction sets it needs";
  if (dtype == DType::f64) return "needs f32, f16 or bf16, got f64";
  return {};
}

// The length of the rows that are read as a whole. Kernels count their elements in 32 bits.
std::int64_t row_length(const GemmProblem& problem) { return problem.k; }
std::int64_t row_length(const NormProblem& problem) { return problem.dim; }
std::int64_t row_length(const RopeProblem& problem) { return problem.dim; }

template <typename Problem>
std::string supports(const Problem& problem) {
  constexpr int most = std::numeric_limits<int>::max();
  if (row_length(problem) > most) return supports_up_to("row lengths", most, row_length(problem));
  return supports_device(problem.device, problem.dtype);
}

template <typename Call>
using Run = void(const Call&, const Context&);
template <typename Call>
using Size = std::size_t(const Call&, const Context&);

constexpr PerLevel<Size<GemmCall>> gemm_workspace = {TILEWISE_EACH_LEVEL(gemm_workspace)};
constexpr PerLevel<Run<GemmCall>> gemm = {TILEWISE_EACH_LEVEL(gemm)};
constexpr PerLevel<Size<NormCall>> norm_workspace = {TILEWISE_EACH_LEVEL(norm_workspace)};
constexpr PerLevel<Run<NormCall>> norm = {TILEWISE_EACH_LEVEL(norm)};
constexpr PerLevel<Size<RopeCall>> rope_workspace = {TILEWISE_EACH_LEVEL(rope_workspace)};
constexpr PerLevel<Run<RopeCall>> rope = {TILEWISE_EACH_LEVEL(rope)};
constexpr PerLevel<Run<ActivationPass>> activation_pass = {TILEWISE_EACH_LEVEL(activation_pass)};
constexpr PerLevel<Size<Matrix>> sum_rows_workspace = {TILEWISE_EACH_LEVEL(sum_rows_workspace)};
constexpr PerLevel<void(const Matrix&, const Vector&, const Context&)> sum_rows = {
    TILEWISE_EACH_LEVEL(sum_rows)};
constexpr PerLevel<void(const Matrix&, const Matrix&, const Context&)> round = {TILEWISE_EACH_LEVEL(round)};
constexpr PerLevel<void(const Matrix&, const Matrix&, const Context&)> add = {TILEWISE_EACH_LEVEL(add)};

// Calls a function's version for the level of the context.
template <const auto& versions, typename Result, typename... Arguments>
Result run(const Arguments&... arguments, const Context& context) {
  return at_level(versions, context)(arguments..., context);
}

}  // namespace
}  // namespace simd

constinit const GemmKernel simd_gemm = {.name = "simd",
                                        .supports = simd::supports<GemmProblem>,
                                        .workspace = simd::run<simd::gemm_workspace, std::size_t, GemmCall>,
                                        .launch = simd::run<simd::gemm, void, GemmCall>};

constinit const NormKernel simd_norm = {.name = "simd",
                                        .supports = simd::supports<NormProblem>,
                                        .workspace = simd::run<simd::norm_workspace, std::size_t, NormCall>,
                                        .launch = simd::run<simd::norm, void, NormCall>};

constinit const RopeKernel simd_rope = {.name = "simd",
                                        .supports = simd::supports<RopeProblem>,
                                        .workspace = simd::run<simd::rope_workspace, std::size_t, RopeCall>,
                                        .launch = simd::run<simd::rope, void, RopeCall>};

constinit const FfnSteps simd_ffn_steps = {
    .activation_pass = simd::run<simd::activation_pass, void, ActivationPass>,
    .sum_rows = simd::run<simd::sum_rows, void, Matrix, Vector>,
    .sum_rows_workspace = simd::run<simd::sum_rows_workspace, std::size_t, Matrix>,
    .round = simd::run<simd::round, void, Matrix, Matrix>,
    .add = simd::run<simd::add, void, Matrix, Matrix>};

}  // namespace tilewise::cpu
