#include <gtest/gtest.h>

#include "attention/validate_case.h"

// Packed sequences, paged keys and block masks.
namespace tilewise::test::validate_layouts_test {
namespace {

class ValidateLayouts : public testing::TestWithParam<Refusal> {};

TEST_P(ValidateLayouts, RefusesWithTheArgumentTheExpectedAndTheGivenAndWritesNothing) {
  expect_refusal(GetParam());
}

const auto name_of = [](const auto& tested) { return std::string(tested.param.name); };

const Refusal packed_sequences[] = {
    {"QRank", packed, [](Scene& s) { s.inputs.q = s.zeros(DType::f32, {1, 4, 6, 4}); }, "q",
     "rank 3 [total_q, Hq, D]", "f32[1, 4, 6, 4]"},
    {"KRank", packed, [](Scene& s) { s.inputs.k = s.zeros(DType::f32, {1, 2, 9, 4}); }, "k",
     "rank 3 [total_k, Hkv, D]", "f32[1, 2, 9, 4]"},
    {"VRank", packed, [](Scene& s) { s.inputs.v = s.zeros(DType::f32, {9, 12}); }, "v",
     "rank 3 [total_k, Hkv, Dv]", "f32[9, 12]"},
    {"VLength", packed, [](Scene& s) { s.inputs.v = s.zeros(DType::f32, {8, 2, 6}); }, "v",
     "the length of k, 9", "f32[8, 2, 6]"},
    {"QNull", packed, [](Scene& s) { s.inputs.q.data = nullptr; }, "q", "data",
     "null data with f32[6, 4, 4]"},
    {"CumulativeQMissing", packed, [](Scene& s) { s.inputs.packed.cumulative_q = {}; }, "packed.cumulative_q",
     "rank 1 [sequences + 1]", ""},
    {"CumulativeKMissing", packed, [](Scene& s) { s.inputs.packed.cumulative_k = {}; }, "packed.cumulative_k",
     "rank 1 [sequences + 1]", ""},
    {"CumulativeRank", packed, [](Scene& s) { s.inputs.packed.cumulative_q = s.indices({1, 3}, {0, 2, 5}); },
     "packed.cumulative_q", "rank 1 [sequences + 1]", "i32[1, 3]"},
    {"CumulativeEmpty", packed, [](Scene& s) { s.inputs.packed.cumulative_k = s.indices({0}, {}); },
     "packed.cumulative_k", "rank 1 [sequences + 1]", "i32[0]"},
    {"CumulativeType", packed, [](Scene& s) { s.inputs.packed.cumulative_q = s.zeros(DType::f32, {3}); },
     "packed.cumulative_q", "i32", "f32"},
    {"CumulativeNull", packed, [](Scene& s) { s.inputs.packed.cumulative_k.data = nullptr; },
     "packed.cumulative_k", "data", "null data with i32[3]"},
    {"CumulativeDevice", packed,
     [](Scene& s) { s.inputs.packed.cumulative_k.device.type = Device::Type::cuda; }, "packed.cumulative_k",
     "memory on cpu", "cuda:0"},
    {"CountsDiffer", packed, [](Scene& s) { s.inputs.packed.cumulative_k = s.indices({2}, {0, 4}); },
     "packed.cumulative_k", "as many entries as cumulative_q, 3", "i32[2]"},
    {"MaxQNegative", packed, [](Scene& s) { s.inputs.packed.max_length_q = -1; }, "packed.max_length_q",
     "0 or above", "-1"},
    {"MaxKNegative", packed, [](Scene& s) { s.inputs.packed.max_length_k = -2; }, "packed.max_length_k",
     "0 or above", "-2"},
    {"StartQ", packed, [](Scene& s) { s.inputs.packed.cumulative_q = s.indices({3}, {1, 2, 5}); },
     "packed.cumulative_q", "a first entry of 0", "1"},
    {"StartKNegative", packed, [](Scene& s) { s.inputs.packed.cumulative_k = s.indices({3}, {-3, 1, 4}); },
     "packed.cumulative_k", "a first entry of 0", "-3"},
    {"DecreasesQ", packed, [](Scene& s) { s.inputs.packed.cumulative_q = s.indices({3}, {0, 3, 2}); },
     "packed.cumulative_q", "do not decrease", "2 at index 2"},
    {"DecreasesK", packed, [](Scene& s) { s.inputs.packed.cumulative_k = s.indices({3}, {0, -1, 4}); },
     "packed.cumulative_k", "do not decrease", "-1 at index 1"},
    {"LongerThanMaxQ", packed, [](Scene& s) { s.inputs.packed.cumulative_q = s.indices({3}, {0, 4, 5}); },
     "packed.cumulative_q", "the maximum length 3", "4 at index 0"},
    {"LongerThanMaxK", packed, [](Scene& s) { s.inputs.packed.max_length_k = 3; }, "packed.cumulative_k",
     "the maximum length 3", "4 at index 0"},
    {"ExceedsQ", packed,
     [](Scene& s) {
       s.inputs.packed.cumulative_q = s.indices({4}, {0, 3, 6, 7});
       s.inputs.packed.cumulative_k = s.indices({4}, {0, 3, 6, 7});
     },
     "packed.cumulative_q", "a last entry of at most 6", "7"},
    {"ExceedsK", packed,
     [](Scene& s) {
       s.inputs.packed.cumulative_q = s.indices({4}, {0, 2, 5, 6});
       s.inputs.packed.cumulative_k = s.indices({4}, {0, 4, 8, 10});
     },
     "packed.cumulative_k", "a last entry of at most 9", "10"},
    {"Mask", packed, [](Scene& s) { s.inputs.mask = s.zeros(DType::boolean, {3, 4}); }, "mask",
     "none with packed sequences", "boolean[3, 4]"},
    {"BlockMask", packed, [](Scene& s) { s.inputs.blocks.counts = s.zeros(DType::i32, {1, 1, 1}); }, "blocks",
     "none with packed sequences", "a block mask"},
    {"PageTable", packed, [](Scene& s) { s.inputs.page_table = s.indices({2, 1}, {0, 0}); }, "page_table",
     "none with packed sequences", "i32[2, 1]"},
    {"KeyLengths", packed, [](Scene& s) { s.inputs.key_lengths = s.indices({2}, {1, 1}); }, "key_lengths",
     "none with packed sequences", "i32[2]"},
    {"Slopes", packed, [](Scene& s) { s.inputs.alibi_slopes = s.zeros(DType::f32, {6, 4}); }, "alibi_slopes",
     "[Hq] or [B, Hq] = [2, 4]", "f32[6, 4]"},
};
INSTANTIATE_TEST_SUITE_P(Packed, ValidateLayouts, testing::ValuesIn(packed_sequences), name_of);

const Refusal pages[] = {
    {"KRank", paged, [](Scene& s) { s.inputs.k = s.zeros(DType::f32, {4, 2, 4}); }, "k",
     "rank 4 [pages, Hkv, page, D]", "f32[4, 2, 4]"},
    {"VRank", paged, [](Scene& s) { s.inputs.v = s.zeros(DType::f32, {4, 2, 6}); }, "v",
     "rank 4 [pages, Hkv, page, Dv]", "f32[4, 2, 6]"},
    {"VPages", paged, [](Scene& s) { s.inputs.v = s.zeros(DType::f32, {5, 2, 2, 6}); }, "v",
     "k's first extent, 4", "f32[5, 2, 2, 6]"},
    {"VPageSize", paged, [](Scene& s) { s.inputs.v = s.zeros(DType::f32, {4, 2, 3, 6}); }, "v",
     "the length of k, 2", "f32[4, 2, 3, 6]"},
    {"PageSizeZero", paged,
     [](Scene& s) {
       s.inputs.k = s.make(DType::f32, {4, 2, 0, 4});
       s.inputs.v = s.make(DType::f32, {4, 2, 0, 6});
     },
     "k", "pages of at least one key", "f32[4, 2, 0, 4]"},
    {"TableRank", paged, [](Scene& s) { s.inputs.page_table = s.indices({3}, {0, 1, 2}); }, "page_table",
     "[B, max_pages] with B 2", "i32[3]"},
    {"TableBatch", paged, [](Scene& s) { s.inputs.page_table = s.indices({1, 3}, {0, 1, 2}); }, "page_table",
     "[B, max_pages] with B 2", "i32[1, 3]"},
    {"TableType", paged, [](Scene& s) { s.inputs.page_table = s.zeros(DType::f32, {2, 3}); }, "page_table",
     "i32", "f32"},
    {"TableNull", paged, [](Scene& s) { s.inputs.page_table.data = nullptr; }, "page_table", "data",
     "null data with i32[2, 3]"},
    {"LengthsMissing", paged, [](Scene& s) { s.inputs.key_lengths = {}; }, "key_lengths",
     "i32 [B] with paged keys", "none"},
    {"LengthOverCapacity", paged, [](Scene& s) { s.inputs.key_lengths = s.indices({2}, {7, 2}); },
     "key_lengths", "lengths from 0 to 6", "7 at index 0"},
    {"PageNegative", paged, [](Scene& s) { s.inputs.page_table = s.indices({2, 3}, {3, -1, 1, 2, 0, 0}); },
     "page_table", "page ids from 0 to 3", "-1"},
    {"PageTooLarge", paged, [](Scene& s) { s.inputs.page_table = s.indices({2, 3}, {3, 0, 4, 2, 0, 0}); },
     "page_table", "page ids from 0 to 3", "4"},
    {"PageOfTheLastEntry", paged, [](Scene& s) { s.inputs.key_lengths = s.indices({2}, {5, 3}); },
     "page_table", "page ids from 0 to 3", "-7"},
};
INSTANTIATE_TEST_SUITE_P(Paged, ValidateLayouts, testing::ValuesIn(pages), name_of);

/// A list of one entry as one of two that are the same memory.
void repeat_entry(Tensor& tensor) {
  tensor.shape[0] = 2;
  tensor.strides[0] = 0;
}

const Refusal blocks[] = {
    {"BlockQ", dense_with_everything, [](Scene& s) { s.inputs.blocks.block_q = 0; }, "blocks.block_q",
     "1 or above", "0"},
    {"BlockK", dense_with_everything, [](Scene& s) { s.inputs.blocks.block_k = -128; }, "blocks.block_k",
     "1 or above", "-128"},
    {"CountsRank", dense_with_everything, [](Scene& s) { s.inputs.blocks.counts = s.indices({2}, {1, 1}); },
     "blocks.counts", "rank 3 [B|1, Hq|1, query blocks]", "i32[2]"},
    {"CountsMissing", dense_with_everything, [](Scene& s) { s.inputs.blocks.counts = {}; }, "blocks.counts",
     "rank 3 [B|1, Hq|1, query blocks]", ""},
    {"CountsType", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.counts = s.zeros(DType::boolean, {1, 1, 2}); }, "blocks.counts", "i32",
     "boolean"},
    {"CountsRows", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.counts = s.indices({1, 1, 3}, {1, 1, 1}); }, "blocks.counts",
     "2 query blocks", "i32[1, 1, 3]"},
    {"CountsBatch", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.counts = s.zeros(DType::i32, {3, 1, 2}); }, "blocks.counts", "B 2",
     "i32[3, 1, 2]"},
    {"CountsHeads", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.counts = s.zeros(DType::i32, {1, 2, 2}); }, "blocks.counts", "Hq 4",
     "i32[1, 2, 2]"},
    {"CountsNull", dense_with_everything, [](Scene& s) { s.inputs.blocks.counts.data = nullptr; },
     "blocks.counts", "data", "null data with i32[1, 1, 2]"},
    {"CountNegative", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.counts = s.indices({1, 1, 2}, {1, -1}); }, "blocks.indices",
     "counts from 0 to 2, its slots", "-1"},
    {"CountTooLarge", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.counts = s.indices({1, 1, 2}, {3, 1}); }, "blocks.indices",
     "counts from 0 to 2, its slots", "3"},
    {"IndicesMissing", dense_with_everything, [](Scene& s) { s.inputs.blocks.indices = {}; },
     "blocks.indices", "rank 4 [B|1, Hq|1, query blocks, slots]", ""},
    {"IndicesRank", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.indices = s.zeros(DType::i32, {1, 1, 2}); }, "blocks.indices",
     "rank 4 [B|1, Hq|1, query blocks, slots]", "i32[1, 1, 2]"},
    {"IndicesRows", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.indices = s.zeros(DType::i32, {1, 1, 1, 2}); }, "blocks.indices",
     "2 query blocks", "i32[1, 1, 1, 2]"},
    {"IndicesLeading", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.indices = s.zeros(DType::i32, {2, 1, 2, 2}); }, "blocks.indices",
     "[1, 1, 2]", "i32[2, 1, 2, 2]"},
    {"IndexTooLarge", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.indices = s.indices({1, 1, 2, 2}, {2, 0, 1, 0}); }, "blocks.indices",
     "key blocks from 0 to 1", "2"},
    {"IndexNegative", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.indices = s.indices({1, 1, 2, 2}, {1, 0, -1, 0}); }, "blocks.indices",
     "key blocks from 0 to 1", "-1"},
    // Counts that both entries share through a stride of 0, and lists that they do not.
    {"IndexBesideRepeatedCounts", dense_with_everything,
     [](Scene& s) {
       repeat_entry(s.inputs.blocks.counts);
       s.inputs.blocks.indices = s.indices({2, 1, 2, 2}, {1, 0, 1, 0, 1, 0, 9, 0});
       s.inputs.blocks.tile_ids = s.zeros(DType::i32, {2, 1, 2, 2});
     },
     "blocks.indices", "key blocks from 0 to 1", "9"},
    {"FullIndexBesideRepeatedCounts", dense_with_everything,
     [](Scene& s) {
       repeat_entry(s.inputs.blocks.full_counts);
       s.inputs.blocks.full_indices = s.indices({2, 1, 2, 2}, {0, 0, 0, 0, 0, 0, -1, 0});
     },
     "blocks.full_indices", "key blocks from 0 to 1", "-1"},
    {"TileIdBesideRepeatedCounts", dense_with_everything,
     [](Scene& s) {
       repeat_entry(s.inputs.blocks.counts);
       repeat_entry(s.inputs.blocks.indices);
       s.inputs.blocks.tile_ids = s.indices({2, 1, 2, 2}, {0, 0, 0, 0, 0, 0, 9, 0});
     },
     "blocks.tile_ids", "ids from 0 to ", "9"},
    {"FullCountsAlone", dense_with_everything, [](Scene& s) { s.inputs.blocks.full_indices = {}; },
     "blocks.full_indices", "both full_counts and full_indices, or neither", "one of them"},
    {"FullIndicesAlone", dense_with_everything, [](Scene& s) { s.inputs.blocks.full_counts = {}; },
     "blocks.full_indices", "both full_counts and full_indices, or neither", "one of them"},
    {"FullCountsType", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.full_counts = s.zeros(DType::f32, {1, 1, 2}); }, "blocks.full_counts",
     "i32", "f32"},
    {"FullIndicesRows", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.full_indices = s.zeros(DType::i32, {1, 1, 5, 2}); },
     "blocks.full_indices", "2 query blocks", "i32[1, 1, 5, 2]"},
    {"FullIndexTooLarge", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.full_indices = s.indices({1, 1, 2, 2}, {0, 0, 9, 0}); },
     "blocks.full_indices", "key blocks from 0 to 1", "9"},
    {"BlockTwice", dense_with_everything,
     [](Scene& s) {
       s.inputs.blocks.counts = s.indices({1, 1, 2}, {1, 2});
       s.inputs.blocks.indices = s.indices({1, 1, 2, 2}, {1, 1, 1, 1});
       s.inputs.blocks.tile_ids = s.zeros(DType::i32, {1, 1, 2, 2});
     },
     "blocks.indices", "each key block at most once in a row of query blocks",
     "block 1 twice in row 1 of batch entry 0, head 0"},
    {"BlockTwiceApart", dense,
     [](Scene& s) {
       s.inputs.blocks = {.block_q = 3,
                          .block_k = 1,
                          .counts = s.indices({2, 4, 1}, {5, 5, 5, 5, 5, 5, 5, 5}),
                          .indices = s.make(DType::i32, {2, 4, 1, 5})};
       std::vector<double> lists;
       for (int head = 0; head < 8; ++head) {
         for (const int block : {4, 0, 3, 1, 2}) lists.push_back(head == 6 && block == 2 ? 0 : block);
       }
       s.buffers.back().set_values(lists);
     },
     "blocks.indices", "each key block at most once in a row of query blocks",
     "block 0 twice in row 0 of batch entry 1, head 2"},
    {"FullBlockTwice", dense_with_everything,
     [](Scene& s) {
       s.inputs.blocks.full_counts = s.indices({1, 1, 2}, {2, 1});
       s.inputs.blocks.full_indices = s.indices({1, 1, 2, 2}, {0, 0, 0, 0});
     },
     "blocks.full_indices", "each key block at most once in a row of query blocks",
     "block 0 twice in row 0 of batch entry 0, head 0"},
    {"BlockInBothLists", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.full_indices = s.indices({1, 1, 2, 2}, {0, -9, 1, -9}); },
     "blocks.full_indices", "each key block at most once in a row of query blocks",
     "block 1, which blocks.indices lists too, in row 1 of batch entry 0, head 0"},
    {"BlockInBothListsOfOneHead", dense_with_everything,
     [](Scene& s) {
       s.inputs.blocks.full_counts = s.indices({1, 4, 2}, {1, 1, 1, 1, 1, 1, 1, 1});
       s.inputs.blocks.full_indices = s.indices({1, 4, 2, 1}, {0, 0, 0, 0, 0, 0, 1, 0});
     },
     "blocks.full_indices", "each key block at most once in a row of query blocks",
     "block 1, which blocks.indices lists too, in row 0 of batch entry 0, head 3"},
    {"BlockTwiceInBackward", backward,
     [](Scene& s) {
       s.inputs.blocks.counts = s.indices({1, 1, 2}, {2, 1});
       s.inputs.blocks.indices = s.indices({1, 1, 2, 2}, {1, 1, 1, 0});
       s.inputs.blocks.tile_ids = s.zeros(DType::i32, {1, 1, 2, 2});
     },
     "blocks.indices", "each key block at most once in a row of query blocks",
     "block 1 twice in row 0 of batch entry 0, head 0"},
    {"TileIdsAlone", dense_with_everything, [](Scene& s) { s.inputs.blocks.tiles = {}; }, "blocks.tile_ids",
     "both tile_ids and tiles, or neither", "one of them"},
    {"TilesAlone", dense_with_everything, [](Scene& s) { s.inputs.blocks.tile_ids = {}; }, "blocks.tile_ids",
     "both tile_ids and tiles, or neither", "one of them"},
    {"TileIdsRank", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.tile_ids = s.zeros(DType::i32, {1, 1, 2}); }, "blocks.tile_ids",
     "rank 4 [B|1, Hq|1, query blocks, slots]", "i32[1, 1, 2]"},
    {"TileIdsType", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.tile_ids = s.zeros(DType::f32, {1, 1, 2, 2}); }, "blocks.tile_ids", "i32",
     "f32"},
    {"TileIdsSlots", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.tile_ids = s.zeros(DType::i32, {1, 1, 2, 3}); }, "blocks.tile_ids",
     "as many slots as indices, ", "i32[1, 1, 2, 3]"},
    {"TileIdsLeading", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.tile_ids = s.zeros(DType::i32, {1, 4, 2, 2}); }, "blocks.tile_ids",
     "[1, 1, 2]", "i32[1, 4, 2, 2]"},
    {"TileIdTooLarge", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.tile_ids = s.indices({1, 1, 2, 2}, {1, 0, 2, 0}); }, "blocks.tile_ids",
     "ids from 0 to 1", "2"},
    {"TileIdNegative", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.tile_ids = s.indices({1, 1, 2, 2}, {-1, 0, 0, 0}); }, "blocks.tile_ids",
     "ids from 0 to 1", "-1"},
    {"TilesType", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.tiles = s.zeros(DType::f32, {2, 2, 3}); }, "blocks.tiles", "boolean",
     "f32"},
    {"TilesShape", dense_with_everything,
     [](Scene& s) { s.inputs.blocks.tiles = s.zeros(DType::boolean, {2, 3, 2}); }, "blocks.tiles",
     "rank 3 [tiles, block_q, block_k]", "boolean[2, 3, 2]"},
    {"TilesNull", dense_with_everything, [](Scene& s) { s.inputs.blocks.tiles.data = nullptr; },
     "blocks.tiles", "data", "null data with boolean[2, 2, 3]"},
};
INSTANTIATE_TEST_SUITE_P(Blocks, ValidateLayouts, testing::ValuesIn(blocks), name_of);

}  // namespace
}  // namespace tilewise::test::validate_layouts_test
