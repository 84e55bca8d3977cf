#include <gtest/gtest.h>

#include <climits>
#include <cstdint>
#include <string>

#include "core/every_operation.h"

// What a caller can write into the plain structs of the public face, in every tensor of every operation.
namespace tilewise::test::hostile_arguments_test {
namespace {

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();

Context serial() { return {.parallel_for = serial_parallel_for()}; }

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

struct Spoil {
  const char* what;
  void (*apply)(Tensor&);
};

const Spoil spoils[] = {
    {"a rank of 6", [](Tensor& t) { t.rank = 6; }},
    {"a rank of INT_MAX", [](Tensor& t) { t.rank = INT_MAX; }},
    {"a negative rank", [](Tensor& t) { t.rank = -1; }},
    {"the lowest rank", [](Tensor& t) { t.rank = INT_MIN; }},
    {"a negative extent", [](Tensor& t) { t.shape[0] = -1; }},
    {"the lowest extent", [](Tensor& t) { t.shape[0] = std::numeric_limits<std::int64_t>::min(); }},
    {"the largest extent", [](Tensor& t) { t.shape[0] = most; }},
    {"extents whose product wraps to 0",
     [](Tensor& t) {
       for (int dim = 0; dim < t.rank; ++dim) t.shape[static_cast<std::size_t>(dim)] = std::int64_t{1} << 32;
       if (t.rank == 1) t.shape[0] = std::int64_t{1} << 62;
       t.data = nullptr;
     }},
    {"a stride that takes it around the world", [](Tensor& t) { t.strides[0] = std::int64_t{1} << 61; }},
    {"the lowest stride", [](Tensor& t) { t.strides[0] = std::numeric_limits<std::int64_t>::min(); }},
    {"an unknown type", [](Tensor& t) { t.dtype = static_cast<DType>(7); }},
    {"the last of all types", [](Tensor& t) { t.dtype = static_cast<DType>(255); }},
    {"an unknown device", [](Tensor& t) { t.device.type = static_cast<Device::Type>(2); }},
    {"another device", [](Tensor& t) { t.device = {Device::Type::cuda, 3}; }},
    {"no data", [](Tensor& t) { t.data = nullptr; }},
};

void expect_refusal(const Operation& made, const std::string& argument, const std::string& what) {
  SCOPED_TRACE(made.name + ", " + argument + " with " + what);
  const auto before = made.bytes();
  const std::string message = refusal([&] { made.workspace(serial()); });
  EXPECT_EQ(message.rfind(argument + ": expected ", 0), 0u) << message;
  EXPECT_EQ(refusal([&] { made.call(serial()); }), message);
  EXPECT_EQ(made.bytes(), before) << "something was written";
}

TEST(HostileArguments, every_list_of_kernels_ends_with_the_reference) {
  for (const auto& names :
       {attention_kernels(), gemm_kernels(), ffn_kernels(), norm_kernels(), rope_kernels()}) {
    ASSERT_GE(names.size(), 2u);
    EXPECT_EQ(names.back(), "reference");
  }
}

TEST(HostileArguments, every_operation_is_sound_before_it_is_spoilt) {
  for (const auto make : every_operation()) {
    const Operation made = make();
    SCOPED_TRACE(made.name);
    EXPECT_NO_THROW(made.run(serial()));
  }
}

TEST(HostileArguments, what_is_no_view_is_refused_by_name_in_every_tensor) {
  for (const auto make : every_operation()) {
    const std::size_t count = make().arguments.size();
    for (std::size_t n = 0; n < count; ++n) {
      for (const Spoil& spoil : spoils) {
        const Operation made = make();
        spoil.apply(*made.arguments[n].tensor);
        expect_refusal(made, made.arguments[n].name, spoil.what);
      }
    }
  }
}

TEST(HostileArguments, elements_between_multiples_of_their_size_are_refused) {
  for (const auto make : every_operation()) {
    const std::size_t count = make().arguments.size();
    for (std::size_t n = 0; n < count; ++n) {
      const Operation made = make();
      const Operation::Argument& argument = made.arguments[n];
      const std::size_t width = size_of(argument.tensor->dtype);
      if (width == 1) continue;
      argument.tensor->data = static_cast<std::byte*>(argument.tensor->data) + width / 2;
      expect_refusal(made, argument.name, "memory that is not aligned");
      EXPECT_EQ(refusal([&] { made.workspace(serial()); }), argument.name + ": expected memory aligned to " +
                                                                std::to_string(width) +
                                                                " bytes, got an unaligned address");
    }
  }
}

TEST(HostileArguments, a_workspace_may_begin_anywhere) {
  for (const auto make : every_operation()) {
    const Operation expected = make();
    expected.run(serial());
    for (const std::size_t offset : {0, 1, 2, 3, 63}) {
      const Operation made = make();
      Context context = serial();
      const std::size_t bytes = made.workspace(context);
      std::vector<std::byte> memory(bytes + offset + 1);
      context.workspace = {memory.data() + offset, bytes};
      made.call(context);
      EXPECT_EQ(made.bytes(), expected.bytes()) << made.name << " at " << offset;
    }
  }
}

TEST(HostileArguments, an_unknown_device_of_the_context_is_refused) {
  for (const auto make : every_operation()) {
    const Operation made = make();
    Context context = serial();
    context.device.type = static_cast<Device::Type>(9);
    for (const Operation::Argument& argument : made.arguments) argument.tensor->device = context.device;
    EXPECT_EQ(refusal([&] { made.workspace(context); }), "device.type: expected cpu or cuda, got 9")
        << made.name;
  }
}

// What an operation may be given in place, as its header says; `first` is the one that is written.
bool may_be_the_same(const std::string& operation, const std::string& written, const std::string& other) {
  const auto is = [&](const char* name, const char* a, const char* b) {
    return operation == name && ((written == a && other == b) || (written == b && other == a));
  };
  return is("gemm", "out", "residual") || is("ffn_forward", "out", "residual") ||
         is("norm_forward", "sum", "x") || is("norm_forward", "sum", "residual") ||
         is("norm_backward", "dx", "dy") || is("norm_backward", "dx", "d_sum") ||
         (operation == "rope" && written == other);
}

// An output laid over each of the other tensors in turn.
TEST(HostileArguments, what_is_written_overlaps_with_nothing_else) {
  struct Written {
    Operation (*make)();
    std::vector<std::string> names;
  };
  std::vector<std::string> gradients = {"dx", "dmask"};
  for (const Operation::Argument& argument : layer_backward_operation().arguments) {
    if (argument.name.rfind("gradients.", 0) == 0) gradients.push_back(argument.name);
  }
  const Written all[] = {
      {attention_forward_operation, {"o", "lse"}},
      {attention_backward_operation, {"dq", "dk", "dv", "dmask", "dsinks", "dlogit_scale"}},
      {packed_attention_operation, {"o"}},
      {paged_attention_operation, {"o"}},
      {gemm_operation, {"out"}},
      {ffn_forward_operation, {"out", "up_product", "gate_product"}},
      {ffn_backward_operation, {"dx", "d_up", "d_gate", "d_down", "d_up_bias", "d_gate_bias", "d_down_bias"}},
      {norm_forward_operation, {"y", "sum", "rstd", "mean"}},
      {norm_backward_operation, {"dx", "d_weight", "d_bias"}},
      {rope_operation, {"k_cache", "v_cache"}},
      {layer_forward_operation, {"out", "k_cache", "v_cache"}},
      {layer_backward_operation, gradients}};
  for (const Written& written : all) {
    const std::size_t count = written.make().arguments.size();
    for (const std::string& name : written.names) {
      for (std::size_t n = 0; n < count; ++n) {
        const Operation made = written.make();
        const Operation::Argument& other = made.arguments[n];
        if (other.name == name || may_be_the_same(made.name, name, other.name)) continue;
        for (const Operation::Argument& argument : made.arguments) {
          if (argument.name != name) continue;
          // The last elements of the one over the first of the other, at a multiple of both sizes.
          const std::int64_t bytes = argument.tensor->size() * 4 / 8 * 8;
          argument.tensor->data = static_cast<std::byte*>(other.tensor->data) + 8 - bytes;
        }
        SCOPED_TRACE(made.name + ": " + name + " over " + other.name);
        const auto before = made.bytes();
        const std::string message = refusal([&] { made.call(serial()); });
        EXPECT_NE(message.find("expected memory that does not overlap "), std::string::npos) << message;
        EXPECT_EQ(made.bytes(), before) << "something was written";
      }
    }
  }
}

// `threads` sizes the workspace: by what can be at work at once, not by what is asked for.
TEST(HostileArguments, any_number_of_threads_gives_the_same_bits_from_a_small_workspace) {
  for (const auto make : every_operation()) {
    const Operation expected = make();
    expected.run(serial());
    Context context = serial();
    context.parallel_for.threads = ParallelFor::most_threads;
    const std::size_t bytes = expected.workspace(context);
    EXPECT_LT(bytes, std::size_t{16} << 20) << expected.name;
    for (const int threads : {INT_MAX, ParallelFor::most_threads + 1, 3}) {
      const Operation made = make();
      context.parallel_for.threads = threads;
      if (threads > ParallelFor::most_threads) {
        EXPECT_EQ(made.workspace(context), bytes) << made.name;
      }
      made.run(context);
      EXPECT_EQ(made.bytes(), expected.bytes()) << made.name << " by " << threads;
    }
    for (const int threads : {0, -1, INT_MIN}) {
      context.parallel_for.threads = threads;
      EXPECT_EQ(refusal([&] { expected.workspace(context); }),
                "parallel_for.threads: expected 1 or more, got " + std::to_string(threads));
    }
  }
}

template <typename Enum>
constexpr Enum unknown = static_cast<Enum>(77);

TEST(HostileArguments, unknown_enumerators_are_refused_by_name) {
  float data[64] = {};
  const Context context = serial();
  const Tensor rows = Tensor::of(data, {2, 4}), heads = Tensor::of(data, {1, 1, 2, 4});
  const Tensor angles = Tensor::of(data, {2, 2});
  const auto attention_with = [&](const AttentionOptions& options) {
    return refusal([&] {
      attention_forward_workspace({.q = heads, .k = heads, .v = heads}, options, {.o = heads}, context);
    });
  };
  EXPECT_EQ(attention_with({.alignment = unknown<Alignment>}),
            "alignment: expected top_left or bottom_right, got 77");
  EXPECT_EQ(attention_with({.precision = unknown<Precision>}),
            "precision: expected standard, allow_tf32 or strict, got 77");
  const auto gemm_with = [&](const GemmOptions& options) {
    return refusal([&] { gemm_workspace({.a = rows, .b = rows}, options, {rows}, context); });
  };
  const std::string activation = "activation: expected none, relu, gelu, gelu_tanh or silu, got 77";
  EXPECT_EQ(gemm_with({.activation = unknown<Activation>}), activation);
  EXPECT_EQ(gemm_with({.precision = unknown<Precision>}),
            "precision: expected standard, allow_tf32 or strict, got 77");
  const auto ffn_with = [&](const FfnOptions& options) {
    const FfnInputs inputs{.x = rows, .up = rows, .down = rows};
    return refusal([&] { ffn_forward_workspace(inputs, options, {.out = rows}, context); });
  };
  EXPECT_EQ(ffn_with({.activation = unknown<Activation>}), activation);
  EXPECT_EQ(ffn_with({.precision = unknown<Precision>}),
            "precision: expected standard, allow_tf32 or strict, got 77");
  EXPECT_EQ(
      refusal([&] { norm_forward_workspace({.x = rows}, {.norm = unknown<Norm>}, {.y = rows}, context); }),
      "norm: expected rms or layer, got 77");
  EXPECT_EQ(refusal([&] {
              rope_workspace({.q = heads, .cos = angles, .sin = angles}, {.pairs = unknown<RopePairs>},
                             {.q = heads}, context);
            }),
            "pairs: expected halves or interleaved, got 77");
}

TEST(HostileArguments, unknown_enumerators_of_a_layer_are_refused_by_name) {
  const auto layer_with = [](void (*spoil)(LayerArguments&)) {
    Operation made{.name = "layer"};
    LayerArguments a;
    a.config.rotary = false;
    made.add("x", a.inputs.x, {2, 3, 8});
    add_layer_weights(made, a.weights, "");
    made.add("out", a.outputs.out, {2, 3, 8});
    spoil(a);
    return refusal([&] { layer_workspace(a.config, a.weights, a.inputs, a.options, a.outputs, serial()); });
  };
  EXPECT_EQ(layer_with([](LayerArguments&) {}), "nothing was thrown");
  EXPECT_EQ(layer_with([](LayerArguments& a) { a.config.norm = unknown<Norm>; }),
            "config.norm: expected rms or layer, got 77");
  EXPECT_EQ(layer_with([](LayerArguments& a) { a.config.activation = unknown<Activation>; }),
            "config.activation: expected none, relu, gelu, gelu_tanh or silu, got 77");
  EXPECT_EQ(layer_with([](LayerArguments& a) { a.config.pairs = unknown<RopePairs>; }),
            "config.pairs: expected halves or interleaved, got 77");
  EXPECT_EQ(layer_with([](LayerArguments& a) { a.options.precision = unknown<Precision>; }),
            "precision: expected standard, allow_tf32 or strict, got 77");
}

// An argument of a call, and where in memory it is said to be; nothing looks there.
Tensor claimed(std::initializer_list<std::int64_t> shape) {
  return Tensor(reinterpret_cast<void*>(std::uintptr_t{1} << 30), DType::f32,
                std::span(shape.begin(), shape.size()));
}

constexpr const char* too_large =
    "workspace: expected a size below 2^63 bytes, got a problem that needs more";

TEST(HostileArguments, a_workspace_of_2_63_bytes_is_refused_and_not_wrapped) {
  constexpr std::int64_t many = std::int64_t{1} << 40;
  const Context context = serial();
  const FfnInputs network{.x = claimed({many, 1}), .up = claimed({many, 1}), .down = claimed({1, many})};
  EXPECT_EQ(refusal([&] {
              ffn_backward_workspace(network, {.kernel = "reference"}, {.d_out = claimed({many, 1})},
                                     context);
            }),
            too_large);
  const LayerConfig config{.embed_dim = 1, .heads_q = many, .heads_kv = many, .head_dim = 1, .ffn_dim = 1};
  const LayerWeights weights{.q = claimed({many, 1}),
                             .k = claimed({many, 1}),
                             .v = claimed({many, 1}),
                             .out = claimed({1, many}),
                             .up = claimed({1, 1}),
                             .down = claimed({1, 1})};
  Tensor out = claimed({1, many, 1});
  out.data = reinterpret_cast<void*>(std::uintptr_t{1} << 50);
  EXPECT_EQ(
      refusal([&] { layer_workspace(config, weights, {.x = claimed({1, many, 1})}, {}, {out}, context); }),
      too_large);
}

TEST(HostileArguments, head_dims_whose_product_overflows_are_refused) {
  const LayerConfig config{.embed_dim = 1, .heads_q = most, .heads_kv = 1, .head_dim = most, .ffn_dim = 1};
  EXPECT_EQ(refusal([&] { layer_workspace(config, {}, {}, {}, {}, serial()); }),
            "config.head_dim: expected fewer than 2^56 features in 9223372036854775807 heads, got "
            "9223372036854775807");
}

TEST(HostileArguments, pages_that_together_overflow_are_refused) {
  constexpr std::int64_t many = std::int64_t{1} << 40;
  const Operation made = paged_attention_operation();
  for (const Operation::Argument& argument : made.arguments) {
    const std::size_t keys = argument.name == "page_table" ? 1 : 2;
    if (keys == 2 && argument.name != "k" && argument.name != "v") continue;
    argument.tensor->shape[keys] = many;
    argument.tensor->strides[keys] = 0;
  }
  const std::string message = refusal([&] { made.workspace(serial()); });
  EXPECT_EQ(message.rfind("k: expected fewer than 2^31 keys", 0), 0u) << message;
}

}  // namespace
}  // namespace tilewise::test::hostile_arguments_test
