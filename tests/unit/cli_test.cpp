// The executable as a user calls it: exit codes, and messages that are printed once.
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>

#include "tests/catch.h"
#include "tests/unit/scratch.h"

namespace {

struct Outcome {
  int code = -1;
  std::string text;  // standard output and error together
};

Outcome shell(const std::string& command) {
  Outcome out;
  std::FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::array<char, 4096> block{};
  for (std::size_t n = 0; (n = std::fread(block.data(), 1, block.size(), pipe)) > 0;) out.text.append(block.data(), n);
  const int status = ::pclose(pipe);
  out.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return out;
}

const std::string kQeffect = QE_QEFFECT;
Outcome qeffect(const std::string& arguments) { return shell(kQeffect + " " + arguments); }
Outcome ranks(int n, const std::string& arguments) {
  return shell(std::string(QE_MPIEXEC) + " --oversubscribe -n " + std::to_string(n) + " " + kQeffect + " " + arguments);
}

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

// A config whose data exist: 1000 bytes of text, tokenized.
std::string tiny_config(const Scratch& dir) {
  std::ofstream(dir / "t.txt") << std::string(1000, 'a');
  REQUIRE(qeffect("tokenize --input " + (dir / "t.txt") + " --output " + (dir / "t.bin")).code == 0);
  std::ofstream(dir / "c.json") << "{\"data\": {\"train\": \"" + (dir / "t.bin") + "\"}}";
  return dir / "c.json";
}

}  // namespace

TEST_CASE("help and version succeed; a wrong command line exits 2 with one message") {
  CHECK(qeffect("--help").code == 0);
  CHECK_THAT(qeffect("--help").text, ContainsSubstring("train"));
  CHECK(qeffect("train --help").code == 0);
  CHECK(qeffect("--version").text.starts_with("qeffect "));
  CHECK_THAT(qeffect("--help-config").text, ContainsSubstring("global_batch_size = 4"));
  for (const char* wrong :
       {"", "fly", "train", "train --config", "train --confg x.json", "tokenize --input a",
        "train --config x.json extra", "train --config " QE_SOURCE_DIR "/configs/quickstart.json --set lr"}) {
    INFO(wrong);
    const Outcome out = qeffect(wrong);
    CHECK(out.code == 2);
    CHECK(out.text.starts_with("qeffect: error: "));
    CHECK(count(out.text, "qeffect: error: ") == 1);
  }
}

TEST_CASE("schema prints what is committed") {
  std::ifstream file(QE_SOURCE_DIR "/configs/schema/config.schema.json");
  std::ostringstream committed;
  committed << file.rdbuf();
  CHECK(qeffect("schema").text == committed.str());
}

TEST_CASE("bench times complete steps and every operation, without data") {
  const Scratch dir;
  std::ofstream(dir / "c.json") << R"({"data": {"train": "none.bin"}, "model": {"num_layers": 2},
                                      "training": {"seq_length": 16, "global_batch_size": 2}})";
  const Outcome out =
      qeffect("bench --config " + (dir / "c.json") + " --steps 2 --warmup 1 --ops --output " + (dir / "bench.json"));
  INFO(out.text);
  REQUIRE(out.code == 0);
  std::ifstream file(dir / "bench.json");
  const auto result = nlohmann::json::parse(file);
  CHECK(result["steps"]["rank_ms"].size() == 1);
  CHECK(result["steps"]["rank_ms"][0].size() == 2);
  CHECK(result["steps"]["median_ms"] > 0.0);
  std::set<std::string> names;
  for (const auto& op : result["ops"]) {
    CHECK(op["us"] > 0.0);
    names.insert(op["name"]);
  }
  for (const char* expected :
       {"gemm F qkv", "gemm I fc2", "gemm W head", "attention_backward", "adamw, a layer, moments f32"}) {
    INFO(expected);
    CHECK(names.count(expected) == 1);
  }
  CHECK(qeffect("bench --config " + (dir / "c.json") + " --steps 1 --output " + (dir / "no/such/folder.json")).code ==
        2);
}

TEST_CASE("a bad config exits 3, bad data exits 4, an existing output exits 2") {
  const Scratch dir;
  const std::string config = tiny_config(dir);
  CHECK(qeffect("train --config " + (dir / "none.json")).code == 3);
  const Outcome misspelt = qeffect("train --config " + config + " --set training.l=1 --set model.num_layer=2");
  CHECK(misspelt.code == 3);
  CHECK_THAT(misspelt.text, ContainsSubstring("the nearest is model.num_layers."));
  CHECK_THAT(misspelt.text, ContainsSubstring("has 2 faults"));
  const Outcome missing = qeffect("train --config " + config + " --set data.train=" + (dir / "no*.bin"));
  CHECK(missing.code == 4);
  CHECK_THAT(missing.text, ContainsSubstring("matches no file"));
  CHECK(qeffect("train --config " + config + " --set model.vocab_size=90").code == 4);
  CHECK(qeffect("train --config " + config + " --set data.valid=" + config).code == 4);
  CHECK(qeffect("tokenize --input " + (dir / "t.txt") + " --output " + (dir / "t.bin")).code == 2);
  CHECK(qeffect("tokenize --force --input " + (dir / "t.txt") + " --output " + (dir / "t.bin")).code == 0);
}

TEST_CASE("what all ranks have wrong is printed once, and the job ends with the code") {
  const Scratch dir;
  const std::string train = "train --config " + tiny_config(dir) + " --set pipeline.pipeline_model_parallel_size=2";
  const Outcome bad_key = ranks(2, train + " --set training.l=1");
  CHECK(bad_key.code == 3);
  CHECK(count(bad_key.text, "qeffect: error: ") == 1);
  const Outcome bad_data = ranks(2, train + " --set data.valid=none.bin");
  CHECK(bad_data.code == 4);
  CHECK(count(bad_data.text, "qeffect: error: ") == 1);
}

TEST_CASE("a job of the wrong size exits 3 and says how many ranks it needs") {
  const Scratch dir;
  const std::string train = "train --config " + tiny_config(dir) + " --set pipeline.pipeline_model_parallel_size=2";
  const Outcome alone = shell("env SLURM_NTASKS=2 SLURM_PROCID=0 " + kQeffect + " " + train);
  INFO(alone.text);
  CHECK(alone.code == 3);
  CHECK_THAT(alone.text, ContainsSubstring("needs 2 rank(s)"));
  CHECK_THAT(alone.text, ContainsSubstring("mpirun -n 2, or srun with an MPI plugin"));
  const Outcome three = ranks(3, train);
  CHECK(three.code == 3);
  CHECK(count(three.text, "qeffect: error: ") == 1);
  CHECK_THAT(three.text, ContainsSubstring("and got 3; start it with mpirun -n 2."));
}
