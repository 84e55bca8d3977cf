#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <deque>
#include <ostream>
#include <string>
#include <typeinfo>
#include <vector>

#include "attention/problem.h"
#include "support/buffer.h"
#include "tilewise/attention.h"

namespace tilewise::test {

/// A call and all the memory it may touch. The scenes below are sound; a test spoils one thing.
struct Scene {
  Pass pass = Pass::forward;
  AttentionInputs inputs;
  AttentionOptions options;
  AttentionOutputs outputs;
  AttentionGradients gradients;
  Context context{.parallel_for = serial_parallel_for()};
  std::deque<Buffer> buffers;

  /// A tensor of the scene, its elements as poison() leaves them.
  Tensor make(DType dtype, Shape shape, const Placement& placement = {}) {
    return buffers.emplace_back(dtype, std::move(shape), placement).view();
  }
  Tensor zeros(DType dtype, Shape shape) {
    const Tensor tensor = make(dtype, std::move(shape));
    buffers.back().fill(0);
    return tensor;
  }
  Tensor indices(Shape shape, const std::vector<double>& values) {
    const Tensor tensor = make(DType::i32, std::move(shape));
    buffers.back().set_values(values);
    return tensor;
  }

  std::size_t workspace_bytes() const {
    return pass == Pass::forward ? attention_forward_workspace(inputs, options, outputs, context)
                                 : attention_backward_workspace(inputs, options, gradients, context);
  }
  Explanation explain() const {
    return pass == Pass::forward ? explain_attention_forward(inputs, options, outputs, context)
                                 : explain_attention_backward(inputs, options, gradients, context);
  }
  /// Gives the call the workspace it asks for, as it stands.
  void provide_workspace() {
    const std::size_t bytes = workspace_bytes();
    context.workspace = {make(DType::boolean, {static_cast<std::int64_t>(bytes)}).data, bytes};
  }
  void call() const {
    if (pass == Pass::forward) {
      attention_forward(inputs, options, outputs, context);
    } else {
      attention_backward(inputs, options, gradients, context);
    }
  }

  std::vector<std::byte> memory() const {
    std::vector<std::byte> all;
    for (const Buffer& buffer : buffers) {
      const std::vector<std::byte> bytes = buffer.bytes();
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
  bool guards_intact() const {
    for (const Buffer& buffer : buffers) {
      if (!buffer.guards_intact()) return false;
    }
    return true;
  }
};

/// B 2, Hq 4, Hkv 2, Sq 3, Sk 5, D 4, Dv 6.
inline Scene dense() {
  Scene s;
  s.inputs.q = s.zeros(DType::f32, {2, 4, 3, 4});
  s.inputs.k = s.zeros(DType::f32, {2, 2, 5, 4});
  s.inputs.v = s.zeros(DType::f32, {2, 2, 5, 6});
  s.outputs.o = s.make(DType::f32, {2, 4, 3, 6});
  s.outputs.lse = s.make(DType::f32, {2, 4, 3});
  return s;
}

/// Every optional input of a dense call: query blocks of 2, key blocks of 3, the first all visible.
inline Scene dense_with_everything() {
  Scene s = dense();
  s.inputs.mask = s.zeros(DType::f32, {2, 4, 3, 5});
  s.inputs.alibi_slopes = s.zeros(DType::f32, {4});
  s.inputs.sinks = s.zeros(DType::f32, {4});
  s.inputs.logit_scale = s.zeros(DType::f32, {4});
  s.inputs.key_lengths = s.indices({2}, {5, 4});
  s.inputs.blocks = {.block_q = 2,
                     .block_k = 3,
                     .counts = s.indices({1, 1, 2}, {1, 1}),
                     .indices = s.indices({1, 1, 2, 2}, {1, -9, 1, -9}),
                     .full_counts = s.indices({1, 1, 2}, {1, 1}),
                     .full_indices = s.indices({1, 1, 2, 2}, {0, -9, 0, -9}),
                     .tile_ids = s.indices({1, 1, 2, 2}, {1, -9, 0, -9}),
                     .tiles = s.zeros(DType::boolean, {2, 2, 3})};
  return s;
}

/// Two sequences of 2 and 3 queries, 4 and 3 keys; one row of q and two of k belong to none.
inline Scene packed() {
  Scene s;
  s.inputs.q = s.zeros(DType::f32, {6, 4, 4});
  s.inputs.k = s.zeros(DType::f32, {9, 2, 4});
  s.inputs.v = s.zeros(DType::f32, {9, 2, 6});
  s.inputs.packed = {.cumulative_q = s.indices({3}, {0, 2, 5}),
                     .cumulative_k = s.indices({3}, {0, 4, 7}),
                     .max_length_q = 3,
                     .max_length_k = 4};
  s.outputs.o = s.make(DType::f32, {6, 4, 6});
  s.outputs.lse = s.make(DType::f32, {4, 6});
  return s;
}

/// Four pages of 2 keys, up to three an entry; ids past an entry's length are never read.
inline Scene paged() {
  Scene s = dense();
  s.inputs.k = s.zeros(DType::f32, {4, 2, 2, 4});
  s.inputs.v = s.zeros(DType::f32, {4, 2, 2, 6});
  s.inputs.page_table = s.indices({2, 3}, {3, 0, 1, 2, -7, 99});
  s.inputs.key_lengths = s.indices({2}, {5, 2});
  return s;
}

/// The gradients of a forward scene's every input.
inline Scene backward_of(Scene s) {
  s.pass = Pass::backward;
  const auto like = [&](const Tensor& tensor) {
    return s.make(tensor.dtype, Shape(tensor.shape.begin(), tensor.shape.begin() + tensor.rank));
  };
  s.gradients.o = s.outputs.o;
  s.gradients.lse = s.outputs.lse;
  s.gradients.d_o = like(s.outputs.o);
  s.gradients.d_lse = like(s.outputs.lse);
  s.gradients.dq = like(s.inputs.q);
  s.gradients.dk = like(s.inputs.k);
  s.gradients.dv = like(s.inputs.v);
  if (s.inputs.mask.given()) s.gradients.dmask = like(s.inputs.mask);
  if (s.inputs.sinks.given()) s.gradients.dsinks = like(s.inputs.sinks);
  if (s.inputs.logit_scale.given()) s.gradients.dlogit_scale = like(s.inputs.logit_scale);
  return s;
}
inline Scene backward() { return backward_of(dense_with_everything()); }
inline Scene packed_backward() { return backward_of(packed()); }

/// What is wrong with a call, and what the message must say about it.
struct Refusal {
  const char* name;
  Scene (*base)();
  void (*spoil)(Scene&);
  const char* argument;
  const char* expected;  ///< part of what stands after "expected"
  const char* given;     ///< part of what stands after "got"
};

inline std::ostream& operator<<(std::ostream& out, const Refusal& refusal) { return out << refusal.name; }

/// The message of the exception that body throws, which must be an E and nothing derived from it.
template <typename E, typename Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const E& error) {
    EXPECT_EQ(typeid(error), typeid(E));
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

/// "argument: expected …, got …", with those parts in it.
inline void expect_message(const std::string& message, const Refusal& refusal) {
  SCOPED_TRACE("message: " + message);
  const std::string head = std::string(refusal.argument) + ": expected ";
  ASSERT_EQ(message.substr(0, head.size()), head);
  const std::size_t got = message.rfind(", got ");
  ASSERT_NE(got, std::string::npos);
  EXPECT_NE(message.substr(head.size(), got - head.size()).find(refusal.expected), std::string::npos)
      << "should expect: " << refusal.expected;
  const std::string given = message.substr(got + 6);
  EXPECT_FALSE(given.empty());
  EXPECT_NE(given.find(refusal.given), std::string::npos) << "should have got: " << refusal.given;
}

/// The base is sound, the spoilt call throws that message before it writes anything, and so do its relatives.
inline void expect_refusal(const Refusal& refusal) {
  Scene sound = refusal.base();
  sound.provide_workspace();
  ASSERT_NO_THROW(sound.call());

  Scene scene = refusal.base();
  scene.provide_workspace();
  refusal.spoil(scene);
  const std::vector<std::byte> before = scene.memory();
  const std::string message = message_of<InvalidArgument>([&] { scene.call(); });
  EXPECT_TRUE(scene.memory() == before) << "something was written";
  EXPECT_TRUE(scene.guards_intact());
  expect_message(message, refusal);
  EXPECT_EQ(message_of<InvalidArgument>([&] { scene.workspace_bytes(); }), message);
  EXPECT_EQ(message_of<InvalidArgument>([&] { scene.explain(); }), message);
}

}  // namespace tilewise::test
