#include "tokenizer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/random.h"
#include "unicode.h"

namespace minilm {
namespace {

using Tokens = std::vector<std::int32_t>;

// tests/python compares with the tokenizers package; here are the rules, one by one.
class TokenizerTest : public testing::Test {
 protected:
  static constexpr const char* words[] = {"[PAD]", "[UNK]",   "[CLS]",  "[SEP]", "[MASK]",
                                          "un",    "##break", "##able", "break", "cafe",
                                          "!",     "中",      "a",      "ss",    "##a"};
  enum : std::int32_t {
    pad,
    unknown,
    begin,
    end,
    mask,
    un,
    _break,
    _able,
    breaks,
    cafe,
    bang,
    middle,
    a,
    ss,
    _a
  };

  static std::filesystem::path write(const std::string& text) {
    const auto test = testing::UnitTest::GetInstance()->current_test_info();
    const auto file =
        std::filesystem::path(testing::TempDir()) / (std::string("vocab_") + test->name() + ".txt");
    std::ofstream(file, std::ios::binary) << text;
    return file;
  }
  static Tokenizer make() {
    std::string text;
    for (const char* word : words) text += std::string(word) + "\n";
    const auto file = write(text);
    const Tokenizer tokenizer(file);
    std::filesystem::remove(file);
    return tokenizer;
  }
  // Without [CLS] and [SEP].
  Tokens tokens(std::string_view text) const {
    const Tokens all = tokenizer.encode(text, 256);
    EXPECT_EQ(all.front(), begin);
    EXPECT_EQ(all.back(), end);
    return {all.begin() + 1, all.end() - 1};
  }

  const Tokenizer tokenizer = make();
};

TEST_F(TokenizerTest, TakesTheLongestPieces) {
  EXPECT_EQ(tokens("unbreakable"), (Tokens{un, _break, _able}));
  EXPECT_EQ(tokens("break able"), (Tokens{breaks, unknown}));
  EXPECT_EQ(tokens("unbreakableness"), (Tokens{unknown})) << "a word is known as a whole or not at all";
  EXPECT_EQ(tokenizer.size(), std::size(words));
}

TEST_F(TokenizerTest, AccentsAndCapitalsAreDropped) {
  for (const char* text : {"cafe", "Café", "CAFE\u0301", "caf\u00e9", "\u200bcafe\ufffd"}) {
    EXPECT_EQ(tokens(text), Tokens{cafe}) << text;
  }
}

TEST_F(TokenizerTest, PunctuationAndIdeographsAreWords) {
  EXPECT_EQ(tokens("a!a"), (Tokens{a, bang, a}));
  EXPECT_EQ(tokens("a中a"), (Tokens{a, middle, a}));
  EXPECT_EQ(tokens(" \t\u3000a\u00a0\n"), Tokens{a});
  EXPECT_EQ(tokens(""), Tokens{});
}

TEST_F(TokenizerTest, NamesOfSpecialTokensStandForThem) {
  EXPECT_EQ(tokens("a[MASK]a[PAD]"), (Tokens{a, mask, a, pad}));
  EXPECT_EQ(tokens("[mask]").size(), 3u);
}

TEST_F(TokenizerTest, AWordOfMoreThanAHundredCharactersIsUnknown) {
  EXPECT_EQ(tokens(std::string(100, 'a')).size(), 100u);
  EXPECT_EQ(tokens(std::string(101, 'a')), Tokens{unknown});
}

TEST_F(TokenizerTest, LongTextsEndEarly) {
  EXPECT_EQ(tokenizer.encode("a a a a a", 4), (Tokens{begin, a, a, end}));
  EXPECT_EQ(tokenizer.encode("a a", 2), (Tokens{begin, end}));
  EXPECT_THROW(tokenizer.encode("a", 1), std::runtime_error);
}

TEST_F(TokenizerTest, WhatIsNotUtf8IsAnError) {
  for (const char* text :
       {"\x80", "a\xc3", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xff", "\xe4\xb8"}) {
    EXPECT_THROW(tokens(text), std::runtime_error) << testing::PrintToString(text);
  }
}

TEST_F(TokenizerTest, Utf8GoesThereAndBack) {
  const std::uint64_t seed = 3;
  SCOPED_TRACE("seed " + std::to_string(seed));
  tilewise::test::Random random(seed);
  std::u32string text;
  for (int n = 0; n < 10000; ++n) {
    const auto character = static_cast<char32_t>(random.log_uniform(1, 0x10ffff));
    if (character < 0xd800 || character >= 0xe000) text += character;
  }
  EXPECT_EQ(decode(encode(text)), text);
}

// Random bytes: tokens or an error, and nothing outside the text is read.
TEST_F(TokenizerTest, BytesOfAnyKindAreTokensOrAnError) {
  const std::uint64_t seed = 4;
  SCOPED_TRACE("seed " + std::to_string(seed));
  tilewise::test::Random random(seed);
  for (int round = 0; round < 5000; ++round) {
    std::string text(static_cast<std::size_t>(random.between(0, 12)), ' ');
    for (char& letter : text) letter = static_cast<char>(random.bits());
    try {
      for (const std::int32_t token : tokenizer.encode(text, 16)) ASSERT_LT(token, std::ssize(words));
    } catch (const std::runtime_error& error) {
      ASSERT_TRUE(std::string(error.what()).starts_with("text: not UTF-8 at byte ")) << error.what();
    }
  }
}

TEST_F(TokenizerTest, AVocabularyWithoutItsSpecialTokensIsRefused) {
  const auto file = write("a\nb\n");
  try {
    const Tokenizer none(file);
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(std::string(error.what()), file.string() + ": a vocabulary without [UNK]");
  }
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace minilm
