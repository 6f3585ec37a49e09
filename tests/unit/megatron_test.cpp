// Megatron .idx and .bin pairs, from bytes that are written here: what is read, and what is refused in which words.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>
#include <vector>

#include "app/data/batch_sampler.h"
#include "app/data/token_dataset.h"
#include "core/error.h"
#include "tests/catch.h"
#include "tests/unit/scratch.h"

using namespace qe;

namespace {

struct Code {
  int code;
  std::size_t bytes;
};
constexpr Code kU8{1, 1}, kI8{2, 1}, kI16{3, 2}, kI32{4, 4}, kI64{5, 8}, kU16{8, 2};

template <class Value>
void append(std::string& bytes, Value value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// An index as Megatron's builder writes it, of sequences with these lengths; every document is one sequence.
std::string index_bytes(Code type, const std::vector<std::int32_t>& lengths, bool modes = false) {
  std::string bytes("MMIDIDX\0\0", 9);
  append(bytes, std::uint64_t{1});
  append(bytes, static_cast<std::uint8_t>(type.code));
  append(bytes, std::uint64_t{lengths.size()});
  append(bytes, std::uint64_t{lengths.size() + 1});
  for (const std::int32_t n : lengths) append(bytes, n);
  std::int64_t begin = 0;
  for (const std::int32_t n : lengths) {
    append(bytes, begin);
    begin += n * static_cast<std::int64_t>(type.bytes);
  }
  for (std::size_t d = 0; d <= lengths.size(); ++d) append(bytes, static_cast<std::int64_t>(d));
  if (modes) bytes.append(lengths.size(), '\0');
  return bytes;
}

std::string token_bytes(Code type, const std::vector<std::int64_t>& tokens) {
  std::string bytes;
  for (const std::int64_t t : tokens) bytes.append(reinterpret_cast<const char*>(&t), type.bytes);  // little-endian
  return bytes;
}

void write(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

void write_pair(const std::string& prefix, Code type, const std::vector<std::int64_t>& tokens,
                const std::vector<std::int32_t>& lengths) {
  write(prefix + ".bin", token_bytes(type, tokens));
  write(prefix + ".idx", index_bytes(type, lengths));
}

std::vector<std::int64_t> counting(int n) {
  std::vector<std::int64_t> out(static_cast<std::size_t>(n));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

std::vector<std::int32_t> all_tokens(const TokenFile& file) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(file.size()));
  file.read(0, out);
  return out;
}

std::string refusal(const std::string& path, int vocab_size = 1000) {
  try {
    const TokenFile file(path, vocab_size, DataFormat::kMegatron);
  } catch (const DataError& e) {
    return e.what();
  }
  return "accepted";
}

TokenDataset open(const std::string& pattern) { return {{pattern}, 1000, 8, "data.train", DataFormat::kMegatron}; }

// A sound pair of three sequences of 4, 0 and 6 tokens, of which one thing is then broken.
class Broken {
 public:
  Broken() : tokens_(token_bytes(kU16, counting(10))), index_(index_bytes(kU16, {4, 0, 6})) {}

  template <class Value>
  std::string with(std::size_t at, Value value) const {
    std::string index = index_;
    std::memcpy(index.data() + at, &value, sizeof value);
    return with_files(tokens_, index);
  }
  [[nodiscard]] std::string with_files(const std::string& tokens, const std::string& index) const {
    write(dir_ / "c.bin", tokens);
    write(dir_ / "c.idx", index);
    return refusal(dir_ / "c.bin");
  }
  [[nodiscard]] const std::string& tokens() const { return tokens_; }
  [[nodiscard]] const std::string& index() const { return index_; }
  [[nodiscard]] std::string path(const std::string& name) const { return dir_ / name; }

 private:
  Scratch dir_;
  std::string tokens_, index_;
};

constexpr std::size_t kLengths = 34, kPointers = 34 + 3 * 4, kDocuments = kPointers + 3 * 8;

}  // namespace

TEST_CASE("every integer type of a Megatron pair reads back what was written") {
  const Scratch dir;
  for (const Code& type : {kU8, kI8, kI16, kI32, kI64, kU16}) {
    INFO("type " << type.code);
    const std::vector<std::int64_t> tokens{0, 127, 5, 1, 100, 3, 2};
    write_pair(dir / "c", type, tokens, {3, 4});
    const TokenFile file(dir / "c.bin", 128, DataFormat::kMegatron);
    CHECK(file.size() == 7);
    CHECK(all_tokens(file) == std::vector<std::int32_t>(tokens.begin(), tokens.end()));
    std::vector<std::int32_t> part(3);
    file.read(4, part);
    CHECK(part == std::vector<std::int32_t>{100, 3, 2});
  }
  write_pair(dir / "c", kU8, {255}, {1});
  CHECK(all_tokens(TokenFile(dir / "c.bin", 256, DataFormat::kMegatron)) == std::vector<std::int32_t>{255});
  write_pair(dir / "c", kU16, {65535}, {1});
  CHECK(all_tokens(TokenFile(dir / "c.bin", 65536, DataFormat::kMegatron)) == std::vector<std::int32_t>{65535});
  write(dir / "c.idx", index_bytes(kU16, {1}, true));  // modes, all of them text
  CHECK(all_tokens(TokenFile(dir / "c.bin", 65536, DataFormat::kMegatron)) == std::vector<std::int32_t>{65535});
}

TEST_CASE("a pair gives the batches of the llm.c shard with the same tokens, document bounds or not") {
  const Scratch dir;
  const std::vector<std::int64_t> tokens = counting(200);
  write_token_file(dir / "llmc.bin", std::vector<std::uint16_t>(tokens.begin(), tokens.end()));
  const TokenDataset shard({dir / "llmc.bin"}, 1000, 8, "data.train");
  BatchSampler sampler(shard.windows(), 4, 3);
  std::vector<std::int64_t> ids;
  for (int step = 0; step < 9; ++step) {
    const std::vector<std::int64_t> next = sampler.next();
    ids.insert(ids.end(), next.begin(), next.end());
  }
  std::vector<std::int32_t> row_tokens(ids.size() * 8), row_targets(row_tokens), wanted_tokens(row_tokens),
      wanted_targets(row_tokens);
  fill_rows(shard, ids, wanted_tokens, wanted_targets);
  for (const std::vector<std::int32_t>& lengths :
       {std::vector<std::int32_t>{200}, {1, 99, 100}, std::vector<std::int32_t>(200, 1)}) {
    for (const Code& type : {kU16, kI32, kI64}) {
      write_pair(dir / "pair", type, tokens, lengths);
      const TokenDataset pair = open(dir / "pair");
      REQUIRE(pair.windows() == shard.windows());
      CHECK(pair.tokens() == shard.tokens());
      CHECK(pair.dropped_tokens() == shard.dropped_tokens());
      fill_rows(pair, ids, row_tokens, row_targets);
      CHECK(row_tokens == wanted_tokens);
      CHECK(row_targets == wanted_targets);
    }
  }
}

TEST_CASE("an index of more sequences than are read at a time is checked to its last one") {
  const Scratch dir;
  const std::vector<std::int32_t> lengths(100000, 1);
  write_pair(dir / "c", kU8, std::vector<std::int64_t>(lengths.size(), 7), lengths);
  CHECK(open(dir / "c.idx").tokens() == 100000);
  for (const std::size_t sequence : {std::size_t{32768}, std::size_t{65535}, std::size_t{99999}}) {
    std::string index = index_bytes(kU8, lengths);
    const std::int64_t off_by_one = static_cast<std::int64_t>(sequence) + 1;
    std::memcpy(index.data() + 34 + 4 * lengths.size() + 8 * sequence, &off_by_one, 8);
    write(dir / "c.idx", index);
    CHECK_THAT(refusal(dir / "c.bin"), ContainsSubstring("lets sequence " + std::to_string(sequence) +
                                                         " begin at byte " + std::to_string(sequence + 1)));
  }
}

TEST_CASE("a pair is named by either file or by their common name, and counts once") {
  const Scratch dir;
  write_pair(dir / "a.v2", kU16, counting(30), {30});
  write_pair(dir / "b", kI32, counting(20), {9, 11});
  write(dir / "notes.txt", "not tokens");
  for (const char* pattern : {"a.v2", "a.v2.bin", "a.v2.idx", "a*"}) {
    INFO(pattern);
    const TokenDataset data = open(dir / pattern);
    CHECK(data.tokens() == 30);
    CHECK(data.files().at(0).path() == dir / "a.v2.bin");
  }
  for (const char* pattern : {"*", "*.bin", "*.idx"}) {
    INFO(pattern);
    CHECK(open(dir / pattern).tokens() == 50);
  }
  const TokenDataset all({dir / "b.idx", dir / "*.bin", dir / "b"}, 1000, 8, "data.train", DataFormat::kMegatron);
  CHECK(all.files().size() == 2);
  CHECK(all.files().at(0).path() == dir / "b.bin");
  CHECK_THROWS_WITH(open(dir / "c"), ContainsSubstring("\"" + (dir / "c.idx") + "\" matches no file"));
}

TEST_CASE("each field of an index, broken, is refused with its file, what was found and what was wanted") {
  const Broken pair;
  REQUIRE(pair.with_files(pair.tokens(), pair.index()) == "accepted");
  const auto check = [&](const std::string& message, const std::string& words, const char* file = "c.idx") {
    INFO(message);
    CHECK_THAT(message, ContainsSubstring("Token file " + pair.path(file) + " ") && ContainsSubstring(words));
    CHECK(std::count(message.begin(), message.end(), '\n') == 0);
  };
  for (const std::size_t at : {0, 6, 7, 8}) check(pair.with(at, 'x'), "does not begin with MMIDIDX");
  check(pair.with(9, std::uint64_t{2}), "has version 2, wanted 1.");
  check(pair.with(9, __builtin_bswap64(1)), "big-endian");
  for (const int code : {0, 9, 255}) {
    check(pair.with(17, static_cast<std::uint8_t>(code)), "has tokens of type " + std::to_string(code) + ", wanted 1 ");
  }
  for (const int code : {6, 7}) check(pair.with(17, static_cast<std::uint8_t>(code)), "(floating point)");
  check(pair.with(18, std::uint64_t{4}),
        "has 102 bytes, wanted 114 for its 4 sequences and 4 document marks; it is cut");
  check(pair.with(18, std::uint64_t{2}), "wanted 90 for its 2 sequences and 4 document marks; it is longer");
  check(pair.with(26, std::uint64_t{5}), "wanted 110 for its 3 sequences and 5 document marks; it is cut short");
  for (const std::size_t at : {18, 26}) {
    for (const std::uint64_t count : {std::numeric_limits<std::uint64_t>::max(), std::uint64_t{1} << 62}) {
      check(pair.with(at, count), "has 102 bytes, too few for its ");
    }
  }
  check(pair.with(kLengths, std::int32_t{-4}), "has a length of -4 for sequence 0");
  check(pair.with(kLengths, std::int32_t{5}), "lets sequence 1 begin at byte 8, wanted 10");
  check(pair.with(kLengths + 8, std::int32_t{7}), "has 20 bytes, wanted 22 for the 11 tokens of", "c.bin");
  check(pair.with(kPointers, std::int64_t{2}), "lets sequence 0 begin at byte 2, wanted 0");
  check(pair.with(kPointers + 16, std::int64_t{-8}), "lets sequence 2 begin at byte -8, wanted 8");
  check(pair.with(kDocuments, std::int64_t{1}), "lets document 0 begin at sequence 1, wanted 0");
  check(pair.with(kDocuments + 8, std::int64_t{3}),
        "lets document 2 begin at sequence 2, before the one before it at 3");
  check(pair.with(kDocuments + 24, std::int64_t{4}), "ends its documents at sequence 4, wanted 3");
  std::string modes = index_bytes(kU16, {4, 0, 6}, true);
  modes.back() = 1;
  check(pair.with_files(pair.tokens(), modes), "has mode 1 for sequence 2, wanted 0");
}

TEST_CASE("no single byte of an index can be changed unseen, but for bounds of documents") {
  const Broken pair;
  for (std::size_t at = 0; at < pair.index().size(); ++at) {
    for (const int flip : {0x01, 0x80, 0xFF}) {
      const auto changed = static_cast<char>(pair.index()[at] ^ flip);
      const std::string message = pair.with(at, changed);
      INFO("byte " << at << " ^ " << flip << ": " << message);
      const bool inner_bound = at >= kDocuments + 8 && at < kDocuments + 24;
      CHECK((message != "accepted" || inner_bound));
      CHECK((message == "accepted" || message.find(pair.path("c.")) != std::string::npos));
    }
  }
}

TEST_CASE("files of a pair that are cut, too long, empty or not there are refused by name") {
  const Broken pair;
  const auto check = [&](const std::string& message, const std::string& words, const char* file) {
    INFO(message);
    CHECK_THAT(message, ContainsSubstring("Token file " + pair.path(file) + " ") && ContainsSubstring(words));
  };
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{33}}) {
    check(pair.with_files(pair.tokens(), pair.index().substr(0, bytes)), "wanted the 34 of an index's header", "c.idx");
  }
  for (const std::size_t bytes : {std::size_t{34}, pair.index().size() - 1}) {
    check(pair.with_files(pair.tokens(), pair.index().substr(0, bytes)), std::to_string(bytes) + " bytes", "c.idx");
  }
  check(pair.with_files(pair.tokens(), pair.index() + "xx"), "longer than its header says", "c.idx");
  check(pair.with_files(pair.tokens().substr(1), pair.index()), "has 19 bytes, wanted 20 for the 10 tokens", "c.bin");
  check(pair.with_files(pair.tokens() + "x", pair.index()), "longer than its index says", "c.bin");
  check(pair.with_files("", index_bytes(kU16, {})), "holds no tokens; leave it out", "c.bin");
  std::string no_marks = index_bytes(kU16, {});
  no_marks.resize(34);
  no_marks[26] = 0;
  check(pair.with_files("", no_marks), "has no document marks", "c.idx");
  std::filesystem::remove(pair.path("c.idx"));
  check(refusal(pair.path("c.bin")), "cannot be opened: No such file", "c.idx");
  std::filesystem::create_directory(pair.path("c.idx"));
  check(refusal(pair.path("c.bin")), "is a directory", "c.idx");
}

TEST_CASE("an id outside the vocabulary is refused as it stands in the file, negative and 64 bits wide too") {
  const Scratch dir;
  const auto refused = [&](Code type, std::int64_t id) {
    write_pair(dir / "c", type, {1, 2, id}, {3});
    return refusal(dir / "c.bin", 100);
  };
  CHECK_THAT(refused(kU16, 100), ContainsSubstring("has id 100 at token 2 (byte 4), wanted ids below"));
  CHECK_THAT(refused(kI8, -1), ContainsSubstring("has id -1 at token 2 (byte 2), wanted ids from 0 and below"));
  CHECK_THAT(refused(kI32, -5), ContainsSubstring("has id -5 at token 2 (byte 8)"));
  CHECK_THAT(refused(kI64, (std::int64_t{1} << 32) + 1), ContainsSubstring("has id 4294967297 at token 2 (byte 16)"));
  CHECK(refused(kI64, 99) == "accepted");
}

TEST_CASE("a file of the other form is refused with the format that reads it") {
  const Scratch dir;
  write_pair(dir / "pair", kU16, counting(20), {20});
  CHECK_THROWS_WITH(TokenDataset({dir / "pair.bin"}, 1000, 8, "data.train"),
                    ContainsSubstring("set data.format to \"megatron\""));
  write_token_file(dir / "shard.bin", std::vector<std::uint16_t>(20, 1));
  CHECK_THROWS_WITH(open(dir / "shard.bin"),
                    ContainsSubstring("shard.idx cannot be opened: No such file") && ContainsSubstring("data.format"));
}
