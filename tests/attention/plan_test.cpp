#include "tilewise/plan.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "attention/validate_case.h"
#include "support/random_problem.h"

namespace tilewise::test::plan_test {
namespace {

/// A scene whose floating tensors are random.
Scene random_scene(Scene (*base)(), std::uint64_t seed) {
  Scene scene = base();
  Random rng(seed);
  for (Buffer& buffer : scene.buffers) {
    if (is_floating(buffer.dtype())) buffer.fill_random(rng);
  }
  return scene;
}

/// All bytes of a scene's tensors. What is left in the workspace is nobody's business.
std::vector<std::byte> tensors_of(const Scene& scene) {
  std::vector<std::byte> all;
  for (const Buffer& buffer : scene.buffers) {
    if (buffer.view().data == scene.context.workspace.data) continue;
    const std::vector<std::byte> bytes = buffer.bytes();
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

/// A plan of a scene's pass, whichever that is.
struct ScenePlan {
  std::optional<AttentionPlan> forward{};
  std::optional<AttentionBackwardPlan> backward{};

  explicit ScenePlan(const Scene& s) {
    if (s.pass == Pass::forward) {
      forward = plan_attention_forward(s.inputs, s.options, s.outputs, s.context);
    } else {
      backward = plan_attention_backward(s.inputs, s.options, s.gradients, s.context);
    }
  }
  std::string_view kernel() const { return forward ? forward->kernel() : backward->kernel(); }
  std::size_t workspace_bytes() const {
    return forward ? forward->workspace_bytes() : backward->workspace_bytes();
  }
  Explanation explain() const { return forward ? forward->explain() : backward->explain(); }
  void run(const Context& context) const { forward ? forward->run(context) : backward->run(context); }
  /// On the tensors of a scene.
  void run(const Scene& s) const {
    forward ? forward->run(s.inputs, s.outputs, s.context) : backward->run(s.inputs, s.gradients, s.context);
  }
};

constexpr std::array scenes = {dense_with_everything, packed, paged, backward, packed_backward};
constexpr std::uint64_t seed = 431;

TEST(Plan, RunsAsTheCallDoes) {
  for (Scene (*base)() : scenes) {
    Scene called = random_scene(base, seed), planned = random_scene(base, seed);
    called.provide_workspace();
    called.call();
    const ScenePlan plan(planned);
    EXPECT_EQ(plan.workspace_bytes(), planned.workspace_bytes());
    planned.provide_workspace();
    plan.run(planned.context);
    EXPECT_TRUE(tensors_of(planned) == tensors_of(called));
    EXPECT_TRUE(planned.guards_intact());
  }
}

TEST(Plan, InputsAreCheckedAloneAsTheCallChecksThem) {
  Scene scene = random_scene(dense_with_everything, seed);
  scene.provide_workspace();
  const std::vector<std::byte> before = tensors_of(scene);
  const auto check = [&] { check_attention_inputs(scene.inputs, scene.options, scene.context); };
  EXPECT_NO_THROW(check());
  scene.inputs.k.shape[scene.inputs.k.rank - 1] -= 1;
  const std::string said = message_of<InvalidArgument>(check);
  EXPECT_FALSE(said.empty());
  EXPECT_EQ(said, message_of<InvalidArgument>([&] { scene.call(); }));
  EXPECT_TRUE(tensors_of(scene) == before);
}

TEST(Plan, TellsItsKernelAsTheExplanationDoes) {
  for (const std::string_view kernel : {"auto", "reference"}) {
    Scene scene = random_scene(dense_with_everything, seed);
    scene.options.kernel = kernel;
    const Explanation explanation = scene.explain();
    const ScenePlan plan(scene);
    EXPECT_EQ(to_string(plan.explain()), to_string(explanation));
    for (const Explanation::Entry& entry : explanation.entries) {
      EXPECT_EQ(entry.verdict == Explanation::Verdict::chosen, entry.kernel == plan.kernel());
    }
  }
}

TEST(Plan, RunsOnOtherTensors) {
  for (Scene (*base)() : scenes) {
    Scene first = random_scene(base, seed), second = random_scene(base, seed + 1);
    Scene called = random_scene(base, seed + 1);
    called.provide_workspace();
    called.call();
    first.provide_workspace();
    second.provide_workspace();
    const ScenePlan plan(first);
    plan.run(first.context);
    const std::vector<std::byte> results = tensors_of(first);
    plan.run(second);
    EXPECT_TRUE(tensors_of(second) == tensors_of(called));
    EXPECT_TRUE(second.guards_intact());
    EXPECT_TRUE(tensors_of(first) == results) << "the tensors of the plan were written once more";
  }
}

TEST(Plan, ReadsKeyLengthsWhenItRuns) {
  Scene scene = random_scene(paged, seed);
  scene.provide_workspace();
  Buffer* lengths = nullptr;
  for (Buffer& buffer : scene.buffers) {
    if (buffer.view().data == scene.inputs.key_lengths.data) lengths = &buffer;
  }
  ASSERT_NE(lengths, nullptr);
  const ScenePlan plan(scene);
  for (const std::vector<double>& values : {std::vector{1.0, 2.0}, std::vector{4.0, 0.0}}) {
    lengths->set_values(values);
    plan.run(scene.context);
    const std::vector<std::byte> results = tensors_of(scene);
    scene.call();
    EXPECT_TRUE(tensors_of(scene) == results);
  }
  lengths->set_values(std::vector{7.0, 2.0});
  const std::vector<std::byte> before = tensors_of(scene);
  EXPECT_EQ(message_of<InvalidArgument>([&] { plan.run(scene.context); }),
            "key_lengths: expected lengths from 0 to 6, got 7 at index 0");
  EXPECT_TRUE(tensors_of(scene) == before) << "something was written";
}

TEST(Plan, IsMadeWhateverIndexTensorsHold) {
  Scene scene = paged();
  for (Buffer& buffer : scene.buffers) {
    if (buffer.view().data == scene.inputs.key_lengths.data) buffer.fill(-1);
  }
  EXPECT_NO_THROW(ScenePlan{scene});
  EXPECT_THROW(scene.call(), InvalidArgument);
}

TEST(Plan, DrawsDropoutFromTheSeedOfTheRun) {
  Scene scene = random_scene(dense, seed);
  scene.options.dropout.probability = 0.5f;
  Buffer words = seed_words({.seed = 1, .offset = 2});
  scene.inputs.dropout_seed = words.view();
  scene.provide_workspace();
  const ScenePlan plan(scene);
  const Buffer other = seed_words({.seed = 3, .offset = 4});
  words.set_values(other.values());
  plan.run(scene.context);
  const std::vector<std::byte> results = tensors_of(scene);
  scene.inputs.dropout_seed = {};
  scene.options.dropout.seed = 3;
  scene.options.dropout.offset = 4;
  scene.call();
  EXPECT_TRUE(tensors_of(scene) == results);
}

TEST(Plan, RunsOnSeveralThreadsAtOnce) {
  Scene first = random_scene(dense_with_everything, seed);
  const ScenePlan plan(first);
  std::vector<Scene> runs;
  for (std::uint64_t n = 0; n < 4; ++n) runs.push_back(random_scene(dense_with_everything, seed + n));
  for (Scene& scene : runs) scene.provide_workspace();
  {
    std::vector<std::jthread> threads;
    for (const Scene& scene : runs) threads.emplace_back([&] { plan.run(scene); });
  }
  for (std::uint64_t n = 0; n < 4; ++n) {
    Scene called = random_scene(dense_with_everything, seed + n);
    called.provide_workspace();
    called.call();
    EXPECT_TRUE(tensors_of(runs[n]) == tensors_of(called));
  }
}

// What does not suit the plan is refused, by its name, before anything is written.
struct Mismatch {
  const char* name;
  Scene (*base)();
  void (*spoil)(Scene&);
  const char* message;
};

const Mismatch mismatches[] = {
    {"type", dense, [](Scene& s) { s.inputs.k.dtype = DType::f16; },
     "k: expected f32[2, 2, 5, 4] with strides [40, 20, 4, 1] on cpu, as planned, got f16[2, 2, 5, 4] with "
     "strides [40, 20, 4, 1] on cpu"},
    {"shape", dense, [](Scene& s) { s.inputs.q.shape[2] = 2; },
     "q: expected f32[2, 4, 3, 4] with strides [48, 12, 4, 1] on cpu, as planned, got f32[2, 4, 2, 4] with "
     "strides [48, 12, 4, 1] on cpu"},
    {"strides", dense, [](Scene& s) { s.outputs.o.strides[0] = 0; },
     "o: expected f32[2, 4, 3, 6] with strides [72, 18, 6, 1] on cpu, as planned, got f32[2, 4, 3, 6] with "
     "strides [0, 18, 6, 1] on cpu"},
    {"device", dense, [](Scene& s) { s.inputs.v.device = {Device::Type::cuda, 0}; },
     "v: expected f32[2, 2, 5, 6] with strides [60, 30, 6, 1] on cpu, as planned, got f32[2, 2, 5, 6] with "
     "strides [60, 30, 6, 1] on cuda:0"},
    {"no tensor", dense_with_everything, [](Scene& s) { s.inputs.sinks = {}; },
     "sinks: expected f32[4], as planned, got none"},
    {"a new tensor", dense, [](Scene& s) { s.inputs.sinks = s.zeros(DType::f32, {4}); },
     "sinks: expected none, as planned, got f32[4]"},
    {"null data", dense, [](Scene& s) { s.inputs.q.data = nullptr; },
     "q: expected data, got null data with f32[2, 4, 3, 4]"},
    {"alignment", dense, [](Scene& s) { s.inputs.q.data = static_cast<float*>(s.inputs.q.data) + 1; },
     "q: expected memory aligned to 16 bytes, as planned, got an unaligned address"},
    {"overlap", dense, [](Scene& s) { s.outputs.lse.data = s.inputs.q.data; },
     "lse: expected memory that does not overlap q, got an overlap"},
    {"bound", packed, [](Scene& s) { s.inputs.packed.max_length_k = 3; },
     "packed.max_length_k: expected 4, as planned, got 3"},
    {"block", dense_with_everything, [](Scene& s) { s.inputs.blocks.block_q = 1; },
     "blocks.block_q: expected 2, as planned, got 1"},
    {"gradient", backward, [](Scene& s) { s.gradients.dmask = {}; },
     "dmask: expected f32[2, 4, 3, 5], as planned, got none"},
    {"contents", paged, [](Scene& s) { s.inputs.key_lengths = s.indices({2}, {5, 9}); },
     "key_lengths: expected lengths from 0 to 6, got 9 at index 1"},
    {"workspace", dense, [](Scene& s) { s.context.workspace.bytes -= 1; }, "workspace: expected at least "},
    {"threads", dense, [](Scene& s) { s.context.parallel_for = openmp_parallel_for(3); },
     "parallel_for.threads: expected from 1 to 1, as planned, got 3"},
    {"device of the context", dense, [](Scene& s) { s.context.device = {Device::Type::cuda, 1}; },
     "device: expected cpu, as planned, got cuda:1"},
    {"SIMD level", dense, [](Scene& s) { s.context.simd_level = "other"; },
     "simd_level: expected '', as planned, got 'other'"},
};

TEST(Plan, NamesWhatDoesNotSuitIt) {
  for (const Mismatch& mismatch : mismatches) {
    SCOPED_TRACE(mismatch.name);
    const Scene planned = random_scene(mismatch.base, seed);
    const ScenePlan plan(planned);
    Scene scene = random_scene(mismatch.base, seed);
    scene.provide_workspace();
    ASSERT_NO_THROW(plan.run(scene));
    mismatch.spoil(scene);
    const std::vector<std::byte> before = tensors_of(scene);
    const std::string message = message_of<InvalidArgument>([&] { plan.run(scene); });
    EXPECT_EQ(message.substr(0, std::string(mismatch.message).size()), mismatch.message);
    EXPECT_TRUE(tensors_of(scene) == before) << "something was written";
  }
}

TEST(Plan, TakesAnyAddressThatIsAlignedAsPlanned) {
  const Placement odd{.lead = 1};
  const auto make = [&](const Placement& placement) {
    Scene s = dense();
    s.inputs.q = s.make(DType::f32, {2, 4, 3, 4}, placement);
    Random rng(seed);
    s.buffers.back().fill_random(rng);
    return s;
  };
  Scene unaligned = make(odd), aligned = make({}), called = make({});
  const ScenePlan plan(unaligned);
  aligned.provide_workspace();
  plan.run(aligned);
  called.provide_workspace();
  called.call();
  EXPECT_TRUE(tensors_of(aligned) == tensors_of(called));
}

TEST(Plan, IsNotMadeOfWhatNoKernelTakes) {
  Scene scene = backward_of(paged());
  scene.inputs.q.dtype = scene.inputs.k.dtype = scene.inputs.v.dtype = DType::f32;
  EXPECT_THROW(ScenePlan{scene}, Unsupported);
  EXPECT_THROW(scene.call(), Unsupported);
}

TEST(Plan, LooksForNoOverlapOfFreshMemory) {
  Scene scene = dense();
  scene.outputs.o = scene.inputs.v;
  scene.outputs.o.shape = {2, 4, 3, 6};
  scene.outputs.o.strides = {72, 18, 6, 1};
  const auto plan = [&](ResultMemory memory) {
    return plan_attention_forward(scene.inputs, scene.options, scene.outputs, scene.context, memory);
  };
  EXPECT_THROW(plan(ResultMemory::callers), InvalidArgument);
  EXPECT_NO_THROW(plan(ResultMemory::fresh));
}

}  // namespace
}  // namespace tilewise::test::plan_test
