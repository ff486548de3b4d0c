#include "common/safetensors/format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>

#include "absl/strings/str_cat.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

// The JSON of a layout.
std::string JsonOf(const SafetensorsLayout& layout) {
  return layout.head.substr(kSafetensorsLengthBytes);
}

TEST(SafetensorsFormat, LaysOutAlignedAndInAnOrderOfItsOwn) {
  const std::vector<TensorSpec> tensors = {
      {"b", "BF16", {3}}, {"c", "F32", {2, 2}}, {"a", "F32", {1}}, {"d", "F64", {}}};
  const auto layout = LayOutSafetensors(tensors, {{"k", "v\"\n"}});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->begins, (std::vector<int64_t>{28, 12, 8, 0}));
  EXPECT_EQ(layout->sizes, (std::vector<int64_t>{6, 16, 4, 8}));
  EXPECT_EQ(layout->data_bytes, 34);
  EXPECT_EQ(layout->head.size() % 64, 0u);
  uint64_t length = 0;
  std::memcpy(&length, layout->head.data(), 8);
  EXPECT_EQ(length + 8, layout->head.size());
  EXPECT_THAT(JsonOf(*layout),
              testing::StartsWith(
                  R"({"__metadata__":{"k":"v\"\n"},"d":{"dtype":"F64","shape":[],"data_offsets":)"
                  R"([0,8]},"a":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},"c":)"));

  const auto index = SafetensorsIndex::Parse(JsonOf(*layout), 34);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->metadata().at("k"), "v\"\n");
  ASSERT_EQ(index->tensors().size(), 4u);
  EXPECT_EQ(index->tensors()[3].name, "b");
  ASSERT_NE(index->Find("c"), nullptr);
  EXPECT_EQ(index->Find("c")->shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(index->Find("c")->begin, 12);
  EXPECT_EQ(index->Find("e"), nullptr);
}

TEST(SafetensorsFormat, RefusesToLayOut) {
  const int64_t big = int64_t{1} << 62;
  const struct {
    std::vector<TensorSpec> tensors;
    const char* part;
  } cases[] = {
      {{{"a", "F32", {1}}, {"a", "F32", {2}}}, "\"a\" is there twice"},
      {{{"__metadata__", "F32", {1}}}, "__metadata__"},
      {{{"a", "F31", {1}}}, "unknown dtype \"F31\""},
      {{{"a", "F32", {-1}}}, "negative"},
      {{{"a", "F32", {big, 4}}}, "2^63"},
      {{{"a", "F32", {big}}}, "2^63 bytes"},
      {{{"a", "U8", {big}}, {"b", "U8", {big}}}, "together"},
      {{{"\xff", "U8", {1}}}, "not UTF-8"},
      {{{"a", "U8", std::vector<int64_t>(33, 1)}}, "33 dimensions"},
  };
  for (const auto& c : cases) {
    const auto layout = LayOutSafetensors(c.tensors, {});
    EXPECT_EQ(layout.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(layout.status().message()), HasSubstr(c.part));
  }
  EXPECT_FALSE(LayOutSafetensors({}, {{"k", "\xc3"}}).ok());
}

TEST(SafetensorsFormat, ReadsWhatOthersWrite) {
  // Spaces, any order of keys and tensors, empty tensors, dtypes of the future, no metadata.
  const auto index = SafetensorsIndex::Parse(
      R"({ "z" : {"data_offsets":[4, 9],"shape":[7],"dtype":"F5_X"},
           "é":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},
           "none":{"dtype":"F32","shape":[0,3],"data_offsets":[4,4]} }   )",
      9);
  ASSERT_TRUE(index.ok()) << index.status();
  ASSERT_EQ(index->tensors().size(), 3u);
  EXPECT_EQ(index->tensors()[0].name, "é");
  EXPECT_EQ(index->tensors()[1].name, "none");
  EXPECT_EQ(index->tensors()[2].dtype, "F5_X");
  EXPECT_TRUE(SafetensorsIndex::Parse("{}", 0).ok());
}

std::string Tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":", shape,
                      ",\"data_offsets\":", offsets, "}");
}

TEST(SafetensorsFormat, RefusesHostileHeaders) {
  const struct {
    std::string json;
    const char* part;
  } cases[] = {
      {"", "does not begin with {"},
      {"[]", "does not begin with {"},
      {"{", "no JSON at byte"},
      {"{}x", "no JSON at byte"},
      {"{\"a\xff\":1}", "no JSON at byte"},
      {"{\"a\":1}", "\"a\" is the number 1"},
      {"{\"a\":null}", "is null"},
      {"{\"a\":[1]}", "is an array"},
      {"{" + Tensor("a", "F32", "[2]", "[0,8]") + "," + Tensor("a", "F32", "[2]", "[0,8]") + "}",
       "overlapping"},
      {"{" + Tensor("a", "F32", "[0]", "[0,0]") + "," + Tensor("a", "F32", "[2]", "[0,8]") + "}",
       "\"a\" is there twice"},
      {"{" + Tensor("a", "F32", "[2]", "[0,7]") + "}", "2 elements of F32 do not fill"},
      {"{" + Tensor("a", "F32", "[2]", "[8,0]") + "}", "run backwards"},
      {"{" + Tensor("a", "F32", "[2]", "[1,9]") + "}", "gap"},
      {"{" + Tensor("a", "F32", "[4]", "[0,16]") + "}", "truncated"},
      {"{" + Tensor("a", "F32", "[1]", "[0,4]") + "}", "fill 4 bytes, but the file has 8"},
      {"{" + Tensor("a", "F32", "[1]", "[0,4]") + "," + Tensor("b", "F32", "[1]", "[6,10]") + "}",
       "gap after byte 4"},
      {"{" + Tensor("a", "F32", "[4294967296,4294967296]", "[0,8]") + "}", "2^63"},
      {"{" + Tensor("a", "F32", "[4611686018427387905]", "[0,8]") + "}", "do not fill"},
      {"{" + Tensor("a", "F32", "[9223372036854775808]", "[0,8]") + "}", "9223372036854775808"},
      {"{" + Tensor("a", "F32", "[99999999999999999999]", "[0,8]") + "}", "99999999999999999999"},
      {"{" + Tensor("a", "F32", "[-2]", "[0,8]") + "}", "-2"},
      {"{" + Tensor("a", "F32", "[2.0]", "[0,8]") + "}", "2.0"},
      {"{" + Tensor("a", "F32", "[[2]]", "[0,8]") + "}", "an array"},
      {"{" + Tensor("a", "F32", "2", "[0,8]") + "}", "the number 2"},
      {"{" + Tensor("a", "F32", "[2]", "[0,8,8]") + "}", "3 numbers instead of 2"},
      {"{" + Tensor("a", "F5", "[2]", "[0,9223372036854775807]") + "}", "truncated"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", "no data_offsets"},
      {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", "\"dtype\" is there twice"},
      {"{\"a\":{\"dtype\":{}}}", "an object"},
      {"{\"a\":{\"device\":\"cpu\"}}", "\"device\" is unknown"},
      {"{\"__metadata__\":{\"k\":1}}", "the number 1"},
      {"{\"__metadata__\":{\"k\":\"\",\"k\":\"\"}}", "\"k\" is there twice"},
      {"{\"__metadata__\":{},\"__metadata__\":{}}", "__metadata__ is there twice"},
  };
  for (const auto& c : cases) {
    const auto index = SafetensorsIndex::Parse(c.json, 8);
    EXPECT_EQ(index.status().code(), absl::StatusCode::kInvalidArgument) << c.json;
    EXPECT_THAT(std::string(index.status().message()), HasSubstr(c.part)) << c.json;
  }
}

TEST(SafetensorsFormat, SizeBombsCostNoMoreThanTheirText) {
  const std::string deep(1 << 24, '[');
  EXPECT_THAT(std::string(SafetensorsIndex::Parse("{\"a\":" + deep, 8).status().message()),
              HasSubstr("an array"));
  std::string objects = "{";
  for (int i = 0; i < 1 << 16; ++i) objects += "\"a\":{";
  EXPECT_FALSE(SafetensorsIndex::Parse(objects, 8).ok());
  std::string dimensions = "1";
  for (int i = 0; i < 1 << 20; ++i) dimensions += ",1";
  EXPECT_THAT(std::string(SafetensorsIndex::Parse(
                              "{" + Tensor("a", "F32", "[" + dimensions + "]", "[0,4]") + "}", 4)
                              .status()
                              .message()),
              HasSubstr("one of more than 32"));
}

TEST(SafetensorsFormat, FindsAmongAMillionNames) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  const int count = 100000;
#else
  const int count = 1000000;
#endif
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < count; ++i) tensors.push_back({absl::StrCat("n", i), "U8", {1}});
  const auto layout = LayOutSafetensors(tensors, {});
  ASSERT_TRUE(layout.ok()) << layout.status();
  const auto index = SafetensorsIndex::Parse(JsonOf(*layout), count);
  ASSERT_TRUE(index.ok()) << index.status();
  for (int i : {0, 1, 17, count / 2, count - 1}) {
    const TensorInfo* found = index->Find(absl::StrCat("n", i));
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(found->begin, layout->begins[i]);
  }
}

// Whatever a header is turned into, it is refused or describes data that is really there.
TEST(SafetensorsFormat, DamagedHeadersNeverPromiseMoreThanTheData) {
  const char* scale = std::getenv("STIEFEL_TEST_SCALE");
  const int rounds = scale != nullptr && std::strcmp(scale, "full") == 0 ? 500000 : 20000;
  const auto layout = LayOutSafetensors(
      {{"w/step1", "F32", {3, 5}}, {"w/step2", "BF16", {4, 2}}, {"b", "I64", {2}}}, {{"k", "v"}});
  ASSERT_TRUE(layout.ok());
  const std::string json = JsonOf(*layout);
  const std::string alphabet = "{}[]\",:0123456789-.eaF \\\xc3";
  std::mt19937_64 random(4);
  int accepted = 0;
  for (int round = 0; round < rounds; ++round) {
    std::string damaged = json;
    for (uint64_t n = 1 + random() % 3; n > 0; --n) {
      const size_t at = random() % damaged.size();
      const char c = alphabet[random() % alphabet.size()];
      if (random() % 3 == 0) {
        damaged.erase(at, 1);
      } else if (random() % 2 == 0) {
        damaged.insert(at, 1, c);
      } else {
        damaged[at] = c;
      }
    }
    const auto index = SafetensorsIndex::Parse(damaged, layout->data_bytes);
    if (!index.ok()) continue;
    ++accepted;
    int64_t end = 0;
    for (const TensorInfo& tensor : index->tensors()) {
      ASSERT_EQ(tensor.begin, end) << damaged;
      end = tensor.end;
      const auto element = TensorDTypeBytes(tensor.dtype);
      if (!element.has_value()) continue;
      ASSERT_EQ(*TensorElements(tensor.shape) * *element, tensor.end - tensor.begin) << damaged;
    }
    ASSERT_EQ(end, layout->data_bytes) << damaged;
  }
  std::cout << rounds << " damaged headers, " << accepted << " still valid\n";
  EXPECT_GT(accepted, 0);
  EXPECT_LT(accepted, rounds);
}

}  // namespace
}  // namespace stiefel
