#include "core/tuning.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "support/random.h"
#include "tilewise/error.h"

namespace tilewise::test::tuning_test {
namespace {

const TuningChoice some_choice{"a GPU, 3 SMs, 9.0", "table", "f32 m=4", "dim=64 wide", 1.5, 2.25};

std::string trouble_of(std::string_view text) {
  try {
    tuning_from_json(text);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return {};
}

TEST(TuningJson, IsReadAsItWasWritten) {
  TuningChoice odd = some_choice;
  odd.device = "quotes \" and \\ and \n and \x01 here";
  odd.row.clear();
  const std::vector<TuningChoice> written = {some_choice, odd};
  const std::vector<TuningChoice> read = tuning_from_json(tuning_to_json(written));
  ASSERT_EQ(read.size(), 2u);
  for (std::size_t n = 0; n < 2; ++n) {
    EXPECT_EQ(read[n].device, written[n].device);
    EXPECT_EQ(read[n].table, written[n].table);
    EXPECT_EQ(read[n].problem, written[n].problem);
    EXPECT_EQ(read[n].row, written[n].row);
    EXPECT_DOUBLE_EQ(read[n].microseconds, 1.5);
    EXPECT_DOUBLE_EQ(read[n].default_microseconds, 2.25);
  }
  EXPECT_TRUE(tuning_from_json(tuning_to_json({})).empty());
}

TEST(TuningJson, SkipsWhatItDoesNotKnow) {
  const auto read = tuning_from_json(
      R"( {"more": [1, -2.5e3, {"a": [true, false, null, []], "b": {}}], "format": "tilewise tuning",
          "version": 1, "choices": [{"note": "\u0041\t", "row": "r", "table": "t", "problem": "p",
          "device": "d"}] } )");
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read[0].row, "r");
}

TEST(TuningJson, RefusesEverythingElse) {
  const std::string good = tuning_to_json(std::vector<TuningChoice>{some_choice});
  ASSERT_EQ(trouble_of(good), "");
  for (std::size_t length = 0; length + 2 < good.size(); ++length) {  // the last two close the object
    EXPECT_NE(trouble_of(good.substr(0, length)), "") << length;
  }
  const std::string begun = R"({"format": "tilewise tuning", "version": 1, )";
  const std::vector<std::string> all = {
      "null",
      "[]",
      "{}",
      good + "x",
      std::string(good.size(), '\0'),
      R"({"format": "tilewise tuning", "version": 2, "choices": []})",
      R"({"format": "another", "version": 1, "choices": []})",
      begun + R"("choices": [{}]})",
      begun + R"("choices": {}})",
      R"({"format": "tilewise tuning", "version": 1e999})",
      R"({"format": "tilewise tuning", "version": --1})",
      R"({"format": "tilewise \u00zz"})",
      R"({"format": "tilewise \q"})",
      R"({"choices": [{"device": 1}]})",
      "{\"a\": \"\n\"}",
      "{\"a\": " + std::string(100000, '['),
  };
  for (const std::string& bad : all) {
    EXPECT_NE(trouble_of(bad), "") << bad.substr(0, 60);
  }
}

TEST(TuningJson, SurvivesRandomChanges) {
  const std::string good = tuning_to_json(std::vector<TuningChoice>{some_choice, some_choice});
  const std::uint64_t seed = 7;
  SCOPED_TRACE(seed);
  Random random(seed);
  int refused = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string text = good;
    const int changes = static_cast<int>(random.between(1, 4));
    for (int n = 0; n < changes; ++n) {
      const auto at = static_cast<std::size_t>(random.between(0, static_cast<int>(text.size()) - 1));
      if (random.chance(0.5)) {
        text[at] = static_cast<char>(random.between(0, 255));
      } else {
        text.erase(at, 1);
      }
    }
    refused += trouble_of(text).empty() ? 0 : 1;
  }
  EXPECT_GT(refused, 1000);
}

TEST(TuningText, HasAHashOfItsOwn) {
  const auto describe = [](auto& text) {
    Description words(text);
    words.word("bf16");
    words.word("");
    words.size("m", 1000);
    words.number("dim", 72);
    words.number("least", std::numeric_limits<std::int64_t>::min());
  };
  TextString text;
  TextHash hash;
  describe(text);
  describe(hash);
  EXPECT_EQ(text.value(), "bf16 m=1024 dim=72 least=-9223372036854775808");
  EXPECT_EQ(hash.value(), text_hash(text.value()));
}

TEST(TuningText, RoundsSizesToThreeBits) {
  for (const std::int64_t same : {0, 1, 2, 7, 8, 10, 14, 1024, 1280, 12288}) {
    EXPECT_EQ(rounded_size(same), same);
  }
  EXPECT_EQ(rounded_size(1000), 1024);
  EXPECT_EQ(rounded_size(4095), 4096);
  EXPECT_EQ(rounded_size(11008), 10240);
  EXPECT_EQ(rounded_size(1200), 1280);
}

/// A table of three rows, of which the last two are able.
class TuningState : public testing::Test {
 protected:
  void SetUp() override {
    unsetenv("TILEWISE_TUNING");
    setenv("XDG_CACHE_HOME", testing::TempDir().c_str(), 1);
    use_tuning({});
  }
  void TearDown() override {
    unsetenv("TILEWISE_TUNING");
    unsetenv("XDG_CACHE_HOME");
    setenv("HOME", home_.c_str(), 1);
    use_tuning({});
  }

  static int answer(std::uint64_t able = 0b110) {
    static const std::uint64_t rows[] = {text_hash("row 0"), text_hash("row 1"), text_hash("row 2")};
    return answer_tuning({.table = "table",
                          .device = 0,
                          .problem = text_hash("problem"),
                          .rows = rows,
                          .able = able,
                          .chosen = 1,
                          .device_text = [](int) { return std::string("here"); },
                          .row_text = [](int row) { return "row " + std::to_string(row); },
                          .problem_text = [](const void*) { return std::string("problem"); },
                          .of = nullptr});
  }
  static TuningChoice choice(const std::string& row, const std::string& device = "here") {
    return {.device = device, .table = "table", .problem = "problem", .row = row};
  }
  static void use(const TuningChoice& choice) { use_tuning(std::vector<TuningChoice>{choice}); }

  static std::string written(const std::string& name, const std::string& text) {
    const std::string path = testing::TempDir() + "tilewise_tuning_" + name;
    std::ofstream(path) << text;
    return path;
  }
  const std::string home_ = std::getenv("HOME") == nullptr ? "" : std::getenv("HOME");

  /// What use_tuning_file() says on standard error about a file.
  static std::string said(const std::string& path) {
    setenv("TILEWISE_TUNING", path.c_str(), 1);
    testing::internal::CaptureStderr();
    use_tuning_file();
    answer();
    answer();
    return testing::internal::GetCapturedStderr();
  }
};

TEST_F(TuningState, AnswersWithTheMeasuredRowIfItIsAble) {
  EXPECT_EQ(answer(), 1);
  use(choice("row 2"));
  EXPECT_TRUE(tuning_asked().load());
  EXPECT_EQ(answer(), 2);
  EXPECT_EQ(answer(0b011), 1);
  use(choice("row 0"));
  EXPECT_EQ(answer(), 1);
  use(choice("a row of another version"));
  EXPECT_EQ(answer(), 1);
  use(choice("row 2", "elsewhere"));
  EXPECT_EQ(answer(), 1);
  use_tuning({});
  EXPECT_EQ(answer(), 1);
  EXPECT_FALSE(tuning_asked().load());
}

TEST_F(TuningState, HearsEachQuestionOnce) {
  use(choice("row 2"));
  const std::uint32_t epoch = tuning_epoch().load();
  const std::vector<TuningQuestion> heard = tuning_questions([&] {
    EXPECT_NE(tuning_epoch().load(), epoch);
    answer();
    answer();
  });
  ASSERT_EQ(heard.size(), 1u);
  EXPECT_EQ(heard[0].device, "here");
  EXPECT_EQ(heard[0].table, "table");
  EXPECT_EQ(heard[0].problem, "problem");
  EXPECT_EQ(heard[0].rows, (std::vector<std::string>{"row 1", "row 2"}));
  EXPECT_EQ(heard[0].default_row, 0u);
  EXPECT_EQ(heard[0].taken_row, 1u);
  EXPECT_THROW(tuning_questions([] { throw Error("no"); }), Error);
  EXPECT_TRUE(end_tuning_questions().empty());  // nobody listens any more
}

TEST_F(TuningState, TuneCallKeepsTheFasterRow) {
  int heard = 0;
  const auto found = tune_call([] { return answer() == 2 ? 5.0 : 8.0; }, 3,
                               [&](const TunedRow& row) {
                                 ++heard;
                                 EXPECT_EQ(row.microseconds, row.row == 1 ? 5.0 : 8.0);
                               });
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].row, "row 2");
  EXPECT_EQ(found[0].microseconds, 5.0);
  EXPECT_EQ(found[0].default_microseconds, 8.0);
  EXPECT_EQ(heard, 2);
  EXPECT_EQ(answer(), 1);  // nothing is in use yet
  use_tuning(found);
  EXPECT_EQ(answer(), 2);
  // The same in noise: the default stays.
  EXPECT_EQ(tune_call([] { return answer() == 2 ? 7.99 : 8.0; })[0].row, "row 1");
  EXPECT_EQ(answer(), 2);  // what was in use before is again
  EXPECT_THROW(tune_call([]() -> double { throw Error("no"); }), Error);
  EXPECT_EQ(answer(), 2);
}

TEST_F(TuningState, ReadsTheFileThatTheEnvironmentNames) {
  const std::string path = written("good", tuning_to_json(std::vector<TuningChoice>{choice("row 2")}));
  EXPECT_EQ(said(path), "");
  EXPECT_EQ(answer(), 2);
  EXPECT_EQ(tuning_status().path, path);
  EXPECT_TRUE(tuning_status().from_file);
  EXPECT_EQ(tuning_status().choices.size(), 1u);
  for (const char* off : {"off", "0"}) {
    setenv("TILEWISE_TUNING", off, 1);
    use_tuning_file();
    EXPECT_EQ(answer(), 1);
    EXPECT_EQ(tuning_status().path, "");
  }
}

TEST_F(TuningState, ReadsTheFileOfTheCacheFolderAndMissesNone) {
  use_tuning_file();
  EXPECT_EQ(tuning_status().path, testing::TempDir() + "/tilewise/tuning.json");
  EXPECT_EQ(tuning_status().trouble, "");
  EXPECT_FALSE(tuning_status().from_file);
  setenv("XDG_CACHE_HOME", "not/absolute", 1);
  setenv("HOME", "/nowhere", 1);
  EXPECT_EQ(tuning_path(), "/nowhere/.cache/tilewise/tuning.json");
}

TEST_F(TuningState, IgnoresABadFileWithOneWarning) {
  const std::string pipe = testing::TempDir() + "tilewise_tuning_pipe";
  std::remove(pipe.c_str());
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {written("bad", "{\"format\": 1}"), written("empty", ""), testing::TempDir(),
                                  pipe, testing::TempDir() + "no/such/file"}) {
    const std::string text = said(path);
    EXPECT_EQ(text.rfind("tilewise: " + path + ": tuning: expected ", 0), 0u) << text;
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    EXPECT_EQ(answer(), 1);
    EXPECT_NE(tuning_status().trouble, "");
  }
}

TEST_F(TuningState, SaysOnceThatAFileIsOfAnotherGpu) {
  const auto text = tuning_to_json(std::vector<TuningChoice>{choice("row 2", "elsewhere")});
  const std::string path = written("elsewhere", text);
  EXPECT_EQ(said(path), "tilewise: " + path + ": measured on elsewhere, not on here; it is not used there\n");
  EXPECT_EQ(answer(), 1);
}

}  // namespace
}  // namespace tilewise::test::tuning_test
