#include "cuda/gemm/cublaslt/cublaslt.h"

#include <library_types.h>

#include <mutex>
#include <unordered_map>

#include "cuda/runtime/cublaslt.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/range.h"
#include "tilewise/error.h"

namespace tilewise::cuda::gemm {
namespace {

int type_of(DType dtype) { return dtype == DType::f16 ? CUDA_R_16F : CUDA_R_16BF; }

/// cuBLASLt's C: the residual or, where a call accumulates, out.
const Matrix& addend_of(const GemmCall& call) { return call.problem.residual ? call.residual : call.out; }

// To cuBLASLt all matrices are column-major. Our row-major matrices are transposed ones to it, so it computes
// outᵀ [N, M] = B [N, K] · Aᵀ [K, M], and our B is its A.

class Layout {
 public:
  /// The layout in memory. A contiguous row of ours is a column of cuBLASLt's.
  Layout(const CublasLt& lt, const Matrix& matrix) : lt_(lt) {
    const bool rows = matrix.by_rows();
    check_cublaslt(lt.create_layout(&layout_, type_of(matrix.dtype),
                                    static_cast<std::uint64_t>(rows ? matrix.columns : matrix.rows),
                                    static_cast<std::uint64_t>(rows ? matrix.rows : matrix.columns),
                                    rows ? matrix.stride_row : matrix.stride_column),
                   "cublasLtMatrixLayoutCreate");
  }
  ~Layout() { lt_.destroy_layout(layout_); }
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  CublasLt::Layout get() const { return layout_; }

 private:
  const CublasLt& lt_;
  CublasLt::Layout layout_ = nullptr;
};

class Description {
 public:
  Description(const CublasLt& lt, const GemmCall& call, const void* bias) : lt_(lt) {
    check_cublaslt(lt.create_description(&description_, CublasLt::compute_f32, CUDA_R_32F),
                   "cublasLtMatmulDescCreate");
    if (call.b.by_rows()) set(CublasLt::transpose_a, CublasLt::transposed);
    if (!call.a.by_rows()) set(CublasLt::transpose_b, CublasLt::transposed);
    if (bias != nullptr) {
      set(CublasLt::epilogue, CublasLt::add_bias);
      set(CublasLt::bias_pointer, bias);
    }
  }
  ~Description() { lt_.destroy_description(description_); }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;
  CublasLt::Description get() const { return description_; }

 private:
  template <typename T>
  void set(int attribute, const T& value) {
    check_cublaslt(lt_.set_description(description_, attribute, &value, sizeof value),
                   "cublasLtMatmulDescSetAttribute");
  }
  const CublasLt& lt_;
  CublasLt::Description description_ = nullptr;
};

class Preference {
 public:
  Preference(const CublasLt& lt, const GemmProblem& problem) : lt_(lt) {
    check_cublaslt(lt.create_preference(&preference_), "cublasLtMatmulPreferenceCreate");
    set(CublasLt::most_workspace, std::uint64_t{32} << 20);  // what cuBLAS itself takes on Hopper
    set(CublasLt::reductions, CublasLt::reduce_in_f32);      // partial sums of split-K are not rounded
    // All calls of a problem state the same alignment, whatever their addresses, because the workspace is
    // asked for before there is one.
    const std::uint32_t alignment = problem.aligned ? 16 : 2;
    for (int matrix = 0; matrix < 4; ++matrix) set(CublasLt::alignment_a + matrix, alignment);
  }
  ~Preference() { lt_.destroy_preference(preference_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  CublasLt::Preference get() const { return preference_; }

 private:
  template <typename T>
  void set(int attribute, const T& value) {
    check_cublaslt(lt_.set_preference(preference_, attribute, &value, sizeof value),
                   "cublasLtMatmulPreferenceSetAttribute");
  }
  const CublasLt& lt_;
  CublasLt::Preference preference_ = nullptr;
};

/// Everything on which the choice of an algorithm depends.
struct Key {
  GemmProblem problem;
  bool bias;
  std::int64_t strides[4];  ///< of A, B, C and out
  friend bool operator==(const Key&, const Key&) = default;

  static Key of(const GemmCall& call) {
    const auto stride = [](const Matrix& matrix) {
      return matrix.by_rows() ? matrix.stride_row : matrix.stride_column;
    };
    return {call.problem,
            call.bias.data != nullptr,
            {stride(call.a), stride(call.b), stride(addend_of(call)), stride(call.out)}};
  }
};
struct KeyHash {
  std::size_t operator()(const Key& key) const {
    std::size_t hash = 0;
    for (const std::int64_t value : {key.problem.m, key.problem.n, key.problem.k, key.strides[0]}) {
      hash = hash * 1000003 + static_cast<std::size_t>(value);
    }
    return hash;
  }
};

CublasLt::Choice ask(const CublasLt& lt, const GemmCall& call) {
  const Layout a(lt, call.b), b(lt, call.a), c(lt, addend_of(call)), d(lt, call.out);
  // The address of the bias says how it may be read. In all calls of the problem it is a multiple of 16.
  const auto* bias = call.bias.data == nullptr ? nullptr : reinterpret_cast<const void*>(std::uintptr_t{16});
  const Description description(lt, call, bias);
  const Preference preference(lt, call.problem);
  CublasLt::Choice choice{};
  int found = 0;
  const CublasLt::Status status = lt.choose(cublaslt_handle(), description.get(), a.get(), b.get(), c.get(),
                                            d.get(), preference.get(), 1, &choice, &found);
  if (status != 0 || found == 0) {
    throw Unsupported("kernel 'cublaslt': cuBLASLt has no algorithm for " + to_string(call.problem) +
                      " (status " + std::to_string(status) + ")");
  }
  return choice;
}

// The algorithm for a call. Known ones are kept; after very many problems the table is cleared.
CublasLt::Choice choice_of(const CublasLt& lt, const GemmCall& call) {
  constexpr std::size_t most = 4096;
  static std::unordered_map<Key, CublasLt::Choice, KeyHash> known;
  static std::mutex mutex;
  const Key key = Key::of(call);
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  if (known.size() >= most) known.clear();
  return known.emplace(key, ask(lt, call)).first->second;
}

constexpr std::size_t library_alignment = 256;

}  // namespace

std::size_t cublaslt_workspace(const GemmCall& call, const Context& context) {
  if (call.problem.m == 0 || call.problem.n == 0) return 0;
  const DeviceGuard guard(context.device.index);
  const std::size_t bytes = choice_of(*find_cublaslt(), call).workspace;
  return bytes == 0 ? 0 : bytes + library_alignment;
}

void run_cublaslt(const GemmCall& call, const Context& context) {
  if (call.problem.m == 0 || call.problem.n == 0) return;
  const CublasLt& lt = *find_cublaslt();
  const CublasLt::Choice choice = choice_of(lt, call);
  const Layout a(lt, call.b), b(lt, call.a), c(lt, addend_of(call)), d(lt, call.out);
  const Description description(lt, call, call.bias.data);
  const float one = 1;
  const float beta = call.problem.residual || call.problem.accumulate ? 1 : 0;
  auto* workspace = static_cast<std::byte*>(context.workspace.data);
  workspace += -reinterpret_cast<std::uintptr_t>(workspace) % library_alignment;
  const Range range("tilewise cublaslt gemm");
  check_cublaslt(lt.multiply(cublaslt_handle(), description.get(), &one, call.b.data, a.get(), call.a.data,
                             b.get(), &beta, addend_of(call).data, c.get(), call.out.data, d.get(),
                             &choice.algorithm, choice.workspace == 0 ? nullptr : workspace, choice.workspace,
                             static_cast<cudaStream_t>(context.stream)),
                 "tilewise cublaslt gemm");
  if (call.problem.activation != Activation::none) activate_in_place(call, context);
}

}  // namespace tilewise::cuda::gemm
