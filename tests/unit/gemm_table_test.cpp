// The tune file: what is written reads back, everything else is refused by name, and a table is used on its platform
// alone.
#include "app/gemm_table.h"

#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "tests/catch.h"
#include "tests/unit/scratch.h"
#include "tests/unit/scripted_gemms.h"

using namespace qe;
using namespace qe::testing;

namespace {

const std::string kOne = "0000000000000042 000000000000000f";
const std::string kTwo = "0000000000000001 0000000000000002";
const GemmPlatform kCard{"NVIDIA H200, sm_90", 132, "cuBLASLt 13.1.0"};
const GemmPlatform kSlice{"NVIDIA H200, sm_90", 60, "cuBLASLt 13.1.0"};

std::vector<GemmTable> two_tables() {
  return {{kCard, {{"D[m 1]", kOne, 10.25, 12.5}, {"D[m 2]", kTwo, 3, 3}}}, {kSlice, {{"D[m 1]", kTwo, 20, 20}}}};
}

// Of the text with one part replaced.
std::string refusal(const std::string& part, const std::string& with) {
  std::string text = gemm_tables_json(two_tables());
  const std::size_t at = text.find(part);
  REQUIRE(at != std::string::npos);
  text.replace(at, part.size(), with);
  try {
    (void)parse_gemm_tables(text, "t.json");
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("tables read back as they were written") {
  CHECK(parse_gemm_tables(gemm_tables_json(two_tables()), "t.json") == two_tables());
  CHECK(parse_gemm_tables(gemm_tables_json({}), "t.json").empty());
}

TEST_CASE("a fault in a tune file is named with file, place, what was found and what was wanted") {
  const auto refused = [](const std::string& part, const std::string& with, const std::string& sentence) {
    INFO(part << " replaced by " << with);
    CHECK_THAT(refusal(part, with), ContainsSubstring("t.json has ") && ContainsSubstring("\n  " + sentence));
  };
  const std::string entry = "tables[0].entries[0]";
  refused("10.25", "0", entry + ".us: found 0, wanted microseconds above 0; mend it, or tune into a new file");
  refused("10.25", "\"x\"", entry + ".us: found \"x\", wanted microseconds above 0");
  refused("\"first_us\": 12.5", "\"last_us\": 12.5", entry + ".first_us: found none, wanted microseconds above 0");
  for (const char* words : {"", "42", "000000000000004G 000000000000000f", "0000000000000042  00000000000000f",
                            "0000000000000042 ", "000000000000004200000000000000042"}) {
    refused(kOne, words, entry + ".algorithm: found \"" + words + "\", wanted words of 16 hexadecimal digits");
  }
  refused("D[m 1]", "", entry + ".product: found \"\", wanted a text");
  refused("D[m 2]", "D[m 1]", "tables[0].entries[1].product: found D[m 1] a second time, wanted each product once");
  refused("132", "0", "tables[0].multiprocessors: found 0, wanted an integer from 1");
  refused("132", "60", "tables[1]: found a second table for NVIDIA H200, sm_90, 60 multiprocessors, cuBLASLt 13.1.0");
  refused("\"schema_version\": 1", "\"schema_version\": 2", "schema_version: found 2, wanted 1");
  refused("\"tables\"", "\"table\"", "tables: found none, wanted a list");
  CHECK_THAT(refusal("\"us\"", "\"first_us\""), ContainsSubstring("found this key more than once"));
  CHECK_THAT(refusal("{", "["), ContainsSubstring("t.json:"));
  CHECK_THAT(refusal("\"us\"", "\"milliseconds\""), ContainsSubstring(entry + ".milliseconds: unknown key"));
}

TEST_CASE("an entry replaces the one of its product and platform and leaves all others") {
  std::vector<GemmTable> tables = two_tables();
  put_entry(tables, kSlice, {"D[m 1]", kOne, 5, 20});
  put_entry(tables, kSlice, {"D[m 3]", kOne, 7, 7});
  put_entry(tables, {"other", 1, "l"}, {"D[m 1]", kOne, 1, 1});
  REQUIRE(tables.size() == 3);
  CHECK(tables[0] == two_tables()[0]);
  CHECK(tables[1].entries == std::vector<GemmTableEntry>{{"D[m 1]", kOne, 5, 20}, {"D[m 3]", kOne, 7, 7}});
  CHECK(tables[2].entries.size() == 1);
}

TEST_CASE("a tune file is replaced at once, and one that cannot be written is refused") {
  const Scratch dir;
  write_gemm_tables(dir / "t.json", {});
  write_gemm_tables(dir / "t.json", two_tables());
  CHECK(read_gemm_tables(dir / "t.json") == two_tables());
  CHECK(std::distance(std::filesystem::directory_iterator(dir.path()), {}) == 1);
  CHECK_THROWS_AS(write_gemm_tables(dir / "no/t.json", {}), UsageError);
  REQUIRE_THROWS_WITH(read_gemm_tables(dir / "none.json"),
                      ContainsSubstring("none.json cannot be opened") && ContainsSubstring("qeffect bench --tune"));
}

TEST_CASE("the tables that come with the program can be read") {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(QE_SOURCE_DIR "/configs/gemm_tables")) {
    CHECK(!read_gemm_tables(entry.path().string()).empty());
    ++files;
  }
  CHECK(files > 0);
}

TEST_CASE("a backend takes the table of its platform alone, and the log says which") {
  const Scratch dir;
  write_gemm_tables(dir / "t.json", two_tables());
  ScriptedBackend scripted;
  Backend& backend = scripted.backend;
  scripted.gemms->platform = kSlice;
  CHECK(use_gemm_table("", backend) == "");
  CHECK(use_gemm_table(dir / "t.json", backend) ==
        (dir / "t.json") + ": 1 tuned product for NVIDIA H200, sm_90, 60 multiprocessors, cuBLASLt 13.1.0");
  CHECK(scripted.gemms->used == std::vector<GemmChoice>{{"D[m 1]", kTwo}});
  scripted.gemms->used.clear();
  scripted.gemms->platform.library = "cuBLASLt 13.2.0";
  CHECK_THAT(use_gemm_table(dir / "t.json", backend),
             ContainsSubstring("is not used: it has no table for NVIDIA H200"));
  CHECK(scripted.gemms->used.empty());
  Backend cpu = make_backend("cpu");
  CHECK_THAT(use_gemm_table(dir / "t.json", cpu), ContainsSubstring("is not used: the CPU backend"));
}
