// Token files, windows, sample order and n-gram yardsticks.
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>
#include <vector>

#include "app/commands/commands.h"
#include "app/data/batch_sampler.h"
#include "app/data/byte_tokenizer.h"
#include "app/data/ngram.h"
#include "app/data/token_dataset.h"
#include "app/data/token_file.h"
#include "core/error.h"
#include "tests/catch.h"
#include "tests/unit/scratch.h"

using namespace qe;

namespace {

constexpr std::int32_t kMagic16 = 20240520, kMagic32 = 20240801;

template <class Token>
void write_shard(const std::string& path, std::int32_t magic, std::int32_t version, std::int32_t count,
                 const std::vector<Token>& tokens) {
  std::int32_t header[256] = {magic, version, count};
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(header), sizeof header);
  file.write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(tokens.size() * sizeof(Token)));
}

std::vector<std::uint16_t> counting(int n) {
  std::vector<std::uint16_t> out(static_cast<std::size_t>(n));
  std::iota(out.begin(), out.end(), std::uint16_t{0});
  return out;
}

std::string refusal(const std::string& path, int vocab_size = 1000) {
  try {
    const TokenFile file(path, vocab_size);
  } catch (const DataError& e) {
    return e.what();
  }
  return "accepted";
}

std::vector<std::int32_t> all_tokens(const TokenFile& file) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(file.size()));
  file.read(0, out);
  return out;
}

}  // namespace

TEST_CASE("uint16 and uint32 shards read back what was written") {
  const Scratch dir;
  write_shard<std::uint16_t>(dir / "a.bin", kMagic16, 1, 4, {0, 65535, 7, 9});
  write_shard<std::uint32_t>(dir / "b.bin", kMagic32, 7, 3, {0, 128255, 7});
  CHECK(all_tokens(TokenFile(dir / "a.bin", 65536)) == std::vector<std::int32_t>{0, 65535, 7, 9});
  CHECK(all_tokens(TokenFile(dir / "b.bin", 128256)) == std::vector<std::int32_t>{0, 128255, 7});
  write_token_file(dir / "c.bin", counting(300));
  const TokenFile written(dir / "c.bin", 300);
  CHECK(written.size() == 300);
  CHECK(all_tokens(written)[299] == 299);
  CHECK_FALSE(std::filesystem::exists(dir / "c.bin.tmp"));
}

TEST_CASE("every damaged token file is refused with its path, what was found and what was wanted") {
  const Scratch dir;
  const std::string path = dir / "x.bin";
  const auto check = [&path](const std::string& words) {
    const std::string message = refusal(path);
    INFO(message);
    CHECK_THAT(message, ContainsSubstring(path));
    CHECK_THAT(message, ContainsSubstring(words));
    CHECK(std::count(message.begin(), message.end(), '\n') == 0);
  };
  check("cannot be opened: No such file");
  std::ofstream(path).close();
  check("is empty, wanted a header of 1024 bytes");
  std::ofstream(path) << "hello";
  check("has 5 bytes, wanted a header of 1024");
  std::ofstream(path) << std::string(2000, 'a');
  check("has magic 1633771873, wanted 20240520");
  write_shard<std::uint16_t>(path, static_cast<std::int32_t>(__builtin_bswap32(kMagic16)), 1, 4, counting(4));
  check("byte-swapped magic of 20240520");
  write_shard<std::uint32_t>(path, static_cast<std::int32_t>(__builtin_bswap32(kMagic32)), 7, 1, {1});
  check("byte-swapped magic of 20240801");
  for (const int version : {0, 99}) {
    write_shard<std::uint16_t>(path, kMagic16, version, 4, counting(4));
    check("has version " + std::to_string(version) + ", wanted 1");
  }
  write_shard<std::uint32_t>(path, kMagic32, 1, 1, {1});
  check("has version 1, wanted 7");
  write_shard<std::uint16_t>(path, kMagic16, 1, 5, counting(4));
  check("has 1032 bytes, wanted 1034 for the 5 tokens in its header; it is cut short");
  write_shard<std::uint16_t>(path, kMagic16, 1, 3, counting(4));
  check("has 1032 bytes, wanted 1030 for the 3 tokens in its header; it is longer");
  std::ofstream(path, std::ios::app) << "z";
  check("has 1033 bytes");
  write_shard<std::uint16_t>(path, kMagic16, 1, -4, counting(4));
  check("token count of -4");
  write_shard<std::uint16_t>(path, kMagic16, 1, 0, {});
  check("holds no tokens");
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  check("is a directory");
}

TEST_CASE("an id at or above the vocabulary is refused with file, place, id and vocabulary, wherever it stands") {
  const Scratch dir;
  for (const std::int64_t at : {0, 5, 65535, 65536, 199999}) {
    std::vector<std::uint16_t> tokens(200000, 256);
    tokens[static_cast<std::size_t>(at)] = 257;
    write_token_file(dir / "a.bin", tokens);
    CHECK_THAT(refusal(dir / "a.bin", 257),
               ContainsSubstring("has id 257 at token " + std::to_string(at) + " (byte " +
                                 std::to_string(1024 + 2 * at) + "), wanted ids below model.vocab_size 257"));
    CHECK(refusal(dir / "a.bin", 258) == "accepted");
  }
  write_shard<std::uint16_t>(dir / "b.bin", kMagic16, 1, 1, {65535});
  CHECK_THAT(refusal(dir / "b.bin", 50257), ContainsSubstring("id 65535"));
  write_shard<std::uint32_t>(dir / "c.bin", kMagic32, 7, 2, {5, 0xFFFFFFFFu});
  CHECK_THAT(refusal(dir / "c.bin", 50257), ContainsSubstring("id 4294967295 at token 1"));
}

TEST_CASE("a token file that changes during the run is a data error that names file, place and id, never a crash") {
  const Scratch dir;
  const std::string path = dir / "a.bin";
  for (const bool wide : {false, true}) {
    if (wide) {
      write_shard<std::uint32_t>(path, kMagic32, 7, 100, std::vector<std::uint32_t>(100, 3));
    } else {
      write_token_file(path, std::vector<std::uint16_t>(100, 3));
    }
    const std::int64_t bytes = wide ? 4 : 2;
    const TokenDataset data({path}, 257, 9, "data.train");
    std::vector<std::int32_t> window(10);
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(1024 + 95 * bytes) << "\xFF\xFF";
    file.flush();
    data.read_window(9, window);  // tokens 81 to 90
    CHECK(window == std::vector<std::int32_t>(10, 3));
    CHECK_THROWS_WITH(data.read_window(10, window),
                      ContainsSubstring("Token file " + path + " has id 65535 at token 95 (byte " +
                                        std::to_string(1024 + 95 * bytes) + ")") &&
                          ContainsSubstring("changed since the run began"));
    std::filesystem::resize_file(path, static_cast<std::uintmax_t>(1024 + 85 * bytes));
    data.read_window(8, window);
    CHECK_THROWS_WITH(data.read_window(9, window),
                      ContainsSubstring(path + " ends at byte " + std::to_string(1024 + 85 * bytes) +
                                        ", wanted the tokens 81 to 90"));
    CHECK_THROWS_AS(ngram_baseline(data, data, 257), DataError);
    std::filesystem::resize_file(path, 0);
    CHECK_THROWS_AS(data.read_window(0, window), DataError);
  }
}

TEST_CASE("what is no regular file is refused without waiting for it") {
  const Scratch dir;
  REQUIRE(::mkfifo((dir / "fifo").c_str(), 0600) == 0);
  for (const std::string& path : {dir / "fifo", std::string("/dev/zero"), std::string("/dev/tty")}) {
    INFO(path);
    CHECK_THAT(refusal(path), ContainsSubstring(path + " is not a regular file; copy what it gives to one."));
    CHECK_THROWS_WITH(run_tokenize({{path}, dir / "out.bin", false}), ContainsSubstring("is not a regular file"));
    CHECK_THROWS_WITH(load_config(path), ContainsSubstring("is not a regular file"));
  }
}

TEST_CASE("windows hold L inputs and one more token, stay inside shards, and leftovers are counted") {
  const Scratch dir;
  const auto windows_of = [&dir](int tokens) {
    write_token_file(dir / "w.bin", counting(tokens));
    const TokenDataset data({dir / "w.bin"}, 1000, 8, "data.train");
    return std::make_pair(data.windows(), data.dropped_tokens());
  };
  CHECK(windows_of(8 * 3 + 1) == std::make_pair(std::int64_t{3}, std::int64_t{0}));
  CHECK(windows_of(8 * 3) == std::make_pair(std::int64_t{2}, std::int64_t{7}));
  CHECK(windows_of(8 * 3 + 2) == std::make_pair(std::int64_t{3}, std::int64_t{1}));
  CHECK(windows_of(9) == std::make_pair(std::int64_t{1}, std::int64_t{0}));
  std::filesystem::remove(dir / "w.bin");

  write_token_file(dir / "s2.bin", counting(20));  // 2 windows, 3 left over
  write_token_file(dir / "s1.bin", counting(5));   // none
  write_token_file(dir / "s3.bin", {{100, 101, 102, 103, 104, 105, 106, 107, 108}});
  const TokenDataset data({dir / "s*.bin", dir / "s2.bin"}, 1000, 8, "data.train");
  CHECK(data.files().size() == 3);
  CHECK(data.tokens() == 34);
  CHECK(data.windows() == 3);
  CHECK(data.dropped_tokens() == 8);
  std::vector<std::int32_t> w(9);
  data.read_window(1, w);
  CHECK(w == std::vector<std::int32_t>{8, 9, 10, 11, 12, 13, 14, 15, 16});
  data.read_window(2, w);
  CHECK(w.front() == 100);
}

TEST_CASE("a file counts once whatever it is called, and a name that exists is no pattern") {
  const Scratch dir;
  write_token_file(dir / "a[1].bin", counting(20));
  write_token_file(dir / "a1.bin", counting(50));
  std::filesystem::create_symlink(dir / "a1.bin", dir / "link.bin");
  CHECK(TokenDataset({dir / "a[1].bin"}, 1000, 8, "data.train").tokens() == 20);
  CHECK(TokenDataset({dir / "a1.bin", dir / "./a1.bin", dir / "link.bin"}, 1000, 8, "data.train").tokens() == 50);
  write_token_file(dir / "\xFF.bin", counting(20));
  CHECK_THROWS_WITH(TokenDataset({dir / "*.bin"}, 1000, 8, "data.train"), ContainsSubstring("is not UTF-8"));
}

TEST_CASE("a pattern without files, an empty list and data without a window are data errors that name the key") {
  const Scratch dir;
  const auto open = [](const std::vector<std::string>& patterns) { TokenDataset(patterns, 1000, 8, "data.valid"); };
  CHECK_THROWS_WITH(open({dir / "*.bin"}), ContainsSubstring("data.valid: \"" + (dir / "*.bin") +
                                                             "\" matches no file in " + dir.path() + ";"));
  CHECK_THROWS_WITH(open({"none.bin"}),
                    ContainsSubstring("matches no file in " + std::filesystem::current_path().string()));
  CHECK_THROWS_WITH(open({}), ContainsSubstring("data.valid names no token file"));
  write_token_file(dir / "a.bin", counting(8));
  CHECK_THROWS_WITH(open({dir / "a.bin"}), ContainsSubstring("training.seq_length + 1 = 9"));
}

TEST_CASE("each epoch visits every window once, in an order of its own") {
  for (const std::int64_t n : {1, 2, 3, 5, 64, 65, 1000}) {
    std::set<std::vector<std::int64_t>> orders;
    for (const std::int64_t epoch : {0, 1}) {
      for (const std::uint64_t seed : {1, 2}) {
        std::vector<std::int64_t> order, sorted;
        for (std::int64_t i = 0; i < n; ++i) order.push_back(shuffled_window(seed, epoch, i, n));
        sorted = order;
        std::sort(sorted.begin(), sorted.end());
        for (std::int64_t i = 0; i < n; ++i) REQUIRE(sorted[static_cast<std::size_t>(i)] == i);
        orders.insert(order);
      }
    }
    if (n >= 64) CHECK(orders.size() == 4);
  }
}

TEST_CASE("the shuffle has no order left: windows that follow each other are as far apart as random ones") {
  constexpr std::int64_t kWindows = 4096;
  for (const std::int64_t lag : {1, 2, 64, 128}) {
    double distance = 0;
    for (std::int64_t i = lag; i < kWindows; ++i) {
      const auto here = shuffled_window(7, 0, i, kWindows), before = shuffled_window(7, 0, i - lag, kWindows);
      distance += static_cast<double>(std::abs(here - before));
    }
    const double mean = distance / static_cast<double>((kWindows - lag) * kWindows);  // a third, give or take 0.004
    INFO("lag " << lag << ": " << mean);
    CHECK(std::abs(mean - 1.0 / 3) < 0.02);
  }
}

TEST_CASE("a sampler set to a position goes on as the one that reached it, across epochs") {
  BatchSampler a(10, 4, 3);
  std::vector<std::int64_t> first_epoch;
  for (int step = 0; step < 7; ++step) {
    const DataPosition before = a.position();
    CHECK(before == DataPosition{step * 4 / 10, step * 4 % 10});
    BatchSampler b(10, 4, 3);
    b.seek(before);
    const auto ids = a.next();
    CHECK(b.next() == ids);
    CHECK(b.position() == a.position());
    first_epoch.insert(first_epoch.end(), ids.begin(), ids.end());
  }
  std::sort(first_epoch.begin(), first_epoch.begin() + 10);
  for (int i = 0; i < 10; ++i) CHECK(first_epoch[static_cast<std::size_t>(i)] == i);
}

TEST_CASE("targets are the tokens one further on") {
  const Scratch dir;
  write_token_file(dir / "a.bin", counting(100));
  const TokenDataset data({dir / "a.bin"}, 100, 8, "data.train");
  std::vector<std::int32_t> tokens(24), targets(24);
  const std::vector<std::int64_t> ids{3, 0, 5};
  fill_rows(data, ids, tokens, targets);
  for (std::size_t i = 0; i < 24; ++i) {
    CHECK(tokens[i] == static_cast<int>(ids[i / 8]) * 8 + static_cast<int>(i % 8));
    CHECK(targets[i] == tokens[i] + 1);
  }
}

TEST_CASE(
    "an evaluation counts every window once whatever the microbatch, and fills the last up with rows that do not "
    "count") {
  const Scratch dir;
  write_token_file(dir / "a.bin", counting(8 * 7 + 1));
  const TokenDataset data({dir / "a.bin"}, 100, 8, "data.valid");
  for (const int rows : {1, 2, 4, 7, 9}) {
    const Evaluation all(data, rows, 0);
    CHECK(all.microbatches() == (7 + rows - 1) / rows);
    CHECK(all.target_tokens() == 56);
    std::vector<std::int32_t> seen;
    for (std::int64_t m = 0; m < all.microbatches(); ++m) {
      std::vector<std::int32_t> tokens(static_cast<std::size_t>(rows) * 8, 77), targets(tokens);
      all.fill(m, tokens, targets);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (targets[i] >= 0) {
          CHECK(targets[i] == tokens[i] + 1);
          seen.push_back(targets[i]);
        } else {
          CHECK(targets[i] == -1);
          CHECK(tokens[i] == 0);
        }
      }
    }
    REQUIRE(seen.size() == 56);
    for (std::size_t i = 0; i < 56; ++i) CHECK(seen[i] == static_cast<int>(i) + 1);
  }
  CHECK(Evaluation(data, 2, 3).microbatches() == 3);
  CHECK(Evaluation(data, 2, 3).target_tokens() == 48);
  CHECK(Evaluation(data, 2, 100).target_tokens() == 56);
}

TEST_CASE("tokenize writes the end mark before each document and refuses to overwrite") {
  const Scratch dir;
  std::ofstream(dir / "a.txt") << "hi\xFF";
  std::ofstream(dir / "b.txt").close();
  TokenizeOptions options{{dir / "a.txt", dir / "b.txt"}, dir / "out.bin", false};
  CHECK(run_tokenize(options) == 0);
  CHECK(all_tokens(TokenFile(dir / "out.bin", kByteVocabulary)) == std::vector<std::int32_t>{256, 'h', 'i', 255, 256});
  CHECK_THROWS_AS(run_tokenize(options), UsageError);
  options.force = true;
  options.inputs = {dir / "a.txt"};
  CHECK(run_tokenize(options) == 0);
  CHECK(TokenFile(dir / "out.bin", kByteVocabulary).size() == 4);
  options.inputs = {dir / "missing.txt"};
  CHECK_THROWS_WITH(run_tokenize(options), ContainsSubstring("missing.txt"));
  options = {{dir / "a.txt"}, dir / "no_such_folder/out.bin", false};
  CHECK_THROWS_WITH(run_tokenize(options), ContainsSubstring((dir / "no_such_folder/out.bin") + " cannot be created"));
  CHECK_THROWS_WITH(run_tokenize({{dir / "b.txt"}, dir / "empty.bin", false}), ContainsSubstring("without any text"));
  CHECK_FALSE(std::filesystem::exists(dir / "empty.bin"));
}

TEST_CASE("tokenize replaces no device, FIFO, folder or input, even by force") {
  const Scratch dir;
  std::ofstream(dir / "a.txt") << "hi";
  REQUIRE(::mkfifo((dir / "fifo").c_str(), 0600) == 0);
  for (const std::string& output : {dir / "fifo", dir / "", std::string("/dev/full")}) {
    INFO(output);
    CHECK_THROWS_AS(run_tokenize({{dir / "a.txt"}, output, true}), UsageError);
  }
  CHECK(std::filesystem::is_fifo(dir / "fifo"));
  CHECK(std::filesystem::is_character_file("/dev/full"));
  CHECK_THROWS_WITH(run_tokenize({{dir / "a.txt"}, dir / "./a.txt", true}), ContainsSubstring("is the input"));
}

TEST_CASE("n-gram baselines are the smoothed counts worked by hand") {
  const Scratch dir;
  write_token_file(dir / "t.bin", {{0, 1, 0, 1, 1}});
  write_token_file(dir / "v.bin", {{0, 1, 1}});
  const TokenDataset train({dir / "t.bin"}, 2, 2, "data.train"), valid({dir / "v.bin"}, 2, 2, "data.valid");
  // n(0)=2, n(1)=3, n(01)=2, n(10)=1, n(11)=1, n(010)=1, n(011)=1, n(101)=1, V=2
  const double p1 = 4.0 / 7;
  const double p2_01 = (2 + p1) / 3, p2_11 = (1 + p1) / 3;
  const double p3_011 = (1 + p2_11) / 3;
  const NgramBaseline b = ngram_baseline(train, valid, 2);
  CHECK(std::abs(b.bigram + (std::log(p2_01) + std::log(p2_11)) / 2) < 1e-12);
  CHECK(std::abs(b.trigram + (std::log(p2_01) + std::log(p3_011)) / 2) < 1e-12);
}
