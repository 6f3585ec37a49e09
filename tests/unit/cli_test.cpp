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

TEST_CASE("bench times complete steps, and every operation on rank 0, for which no rank has to wait") {
  const Scratch dir;
  std::ofstream(dir / "c.json") << R"({"data": {"train": "none.bin"}, "model": {"num_layers": 2},
                                      "training": {"seq_length": 16, "global_batch_size": 2},
                                      "pipeline": {"pipeline_model_parallel_size": 2}, "runtime": {"timeout_s": 2}})";
  const Outcome out =
      ranks(2, "bench --config " + (dir / "c.json") + " --steps 2 --warmup 1 --ops --output " + (dir / "bench.json"));
  INFO(out.text);
  REQUIRE(out.code == 0);
  std::ifstream file(dir / "bench.json");
  const auto result = nlohmann::json::parse(file);
  CHECK(result["steps"]["rank_ms"].size() == 2);
  CHECK(result["steps"]["rank_ms"][0].size() == 2);
  CHECK(result["steps"]["median_ms"] > 0.0);
  std::set<std::string> names;
  for (const auto& op : result["ops"]) {
    CHECK(op["us"] > 0.0);
    names.insert(op["name"]);
  }
  for (const char* expected :
       {"gemm F qkv", "gemm I fc2", "gemm W head", "attention_backward", "adamw and copies, a layer, moments f32"}) {
    INFO(expected);
    CHECK(names.count(expected) == 1);
  }
  CHECK(qeffect("bench --config " + (dir / "c.json") +
                " --set pipeline.pipeline_model_parallel_size=1 --steps 1 --output " + (dir / "no/such/folder.json"))
            .code == 2);
}

TEST_CASE("tuning and tune files are refused where they mean nothing, before work starts") {
  const Scratch dir;
  const std::string config = " --config " + tiny_config(dir);
  const Outcome cpu = qeffect("bench" + config + " --set execution.backend=cpu --tune " + (dir / "t.json"));
  CHECK(cpu.code == 3);
  CHECK_THAT(cpu.text, ContainsSubstring("bench --tune wants cuda, on a machine with a GPU."));
  CHECK_FALSE(std::filesystem::exists(dir / "t.json"));
  CHECK(qeffect("bench" + config + " --ops --tune " + (dir / "t.json")).code == 2);
  const Outcome two =
      ranks(2, "bench" + config + " --set pipeline.pipeline_model_parallel_size=2 --tune " + (dir / "t.json"));
  CHECK(two.code == 3);
  CHECK_THAT(two.text, ContainsSubstring("got 2; start it with mpirun -n 1."));
  std::ofstream(dir / "t.json") << R"({"schema_version": 1, "tables": [7]})";
  for (const std::string command : {"train", "bench"}) {
    const Outcome out = qeffect(command + config + " --set execution.gemm_table=" + (dir / "t.json"));
    CHECK(out.code == 3);
    CHECK_THAT(out.text,
               ContainsSubstring("t.json has a fault") && ContainsSubstring("tables[0]: found 7, wanted an object"));
  }
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

TEST_CASE("what one rank has wrong is printed with its rank, and no rank ends in silence") {
  const Scratch dir;
  const std::string good = kQeffect + " train --config " + tiny_config(dir);
  const auto pair = [](const std::string& first, const std::string& second) {
    return shell(std::string(QE_MPIEXEC) + " --oversubscribe -n 1 " + first + " : -n 1 " + second);
  };
  const Outcome config = pair(good, kQeffect + " train --config " + (dir / "none.json"));
  INFO(config.text);
  CHECK(config.code == 3);
  CHECK(count(config.text, "qeffect: error: rank 1: The config file " + (dir / "none.json")) == 1);
  const Outcome data = pair(good + " --set data.train=none.bin", good);
  CHECK(data.code == 4);
  CHECK(count(data.text, "qeffect: error: rank 0: data.train") == 1);
  const Outcome usage = pair(good, kQeffect + " trian");
  CHECK(usage.code == 2);
  CHECK(count(usage.text, "qeffect: error: rank 1: trian is no command; the nearest is train") == 1);
  const Outcome other = pair(good + " --set training.seed=1", good + " --set training.seed=2");
  INFO(other.text);
  CHECK(other.code == 3);
  CHECK(count(other.text, "qeffect: error: ") == 1);
  CHECK_THAT(other.text, ContainsSubstring("Rank 1 has \"seed\": 2 where rank 0 has \"seed\": 1; give every rank"));
}

TEST_CASE("wrong usage says where to look") {
  CHECK_THAT(qeffect("trian --config x").text,
             ContainsSubstring("trian is no command; the nearest is train, see qeffect --help."));
  CHECK_THAT(qeffect("train --confg x").text, ContainsSubstring("; see qeffect train --help."));
  CHECK_THAT(qeffect("tokenize").text, ContainsSubstring("; see qeffect tokenize --help."));
  CHECK_THAT(qeffect("").text, ContainsSubstring("there are train, plan, bench,"));
}

TEST_CASE(
    "a run that fails leaves a report with the error, its exit code and its step, and a line that says non_finite") {
  const Scratch dir;
  const std::string train = "train --config " + tiny_config(dir) +
                            " --set training.train_iters=30 --set report.dir=" + (dir / "run") +
                            " --set precision.compute=fp32";
  const auto report = [&dir] {
    std::ifstream file(dir / "run/report.json");
    return nlohmann::json::parse(file);
  };
  const Outcome stopped = qeffect(train + " --set training.lr=1e6 --set optimizer.weight_decay=10");
  INFO(stopped.text);
  REQUIRE(stopped.code == 7);
  CHECK(report()["status"] == "failed");
  CHECK(report()["failure"]["exit_code"] == 7);
  const int step = report()["failure"]["step"];
  CHECK_THAT(report()["failure"]["message"].get<std::string>(), ContainsSubstring("Step " + std::to_string(step)));
  std::ifstream metrics(dir / "run/metrics.jsonl");
  std::string last;
  for (std::string line; std::getline(metrics, line);) last = line;
  CHECK(nlohmann::json::parse(last)["status"] == "non_finite");
  CHECK_THAT(stopped.text, ContainsSubstring("| not finite"));
  CHECK(count(stopped.text, "-nan") == 0);
}

TEST_CASE("a run stops when max_skipped steps in a row are skipped, and each of them is logged so") {
  const Scratch dir;
  const Outcome out =
      qeffect("train --config " + tiny_config(dir) + " --set report.dir=" + (dir / "run") +
              " --set training.train_iters=30 --set training.lr=1e6 --set optimizer.weight_decay=10" +
              " --set precision.compute=fp32 --set training.on_nonfinite=skip --set training.max_skipped=2");
  INFO(out.text);
  CHECK(out.code == 7);
  CHECK(count(out.text, "| skipped") == 2);
  CHECK(count(out.text, "not finite; the step is skipped") == 1);
  CHECK(count(out.text, "2 steps in a row skipped reach training.max_skipped") == 1);
}

TEST_CASE("a backend that was not built in is refused once, before the job starts") {
  const Scratch dir;
  const std::string train = "train --config " + tiny_config(dir);
  const Outcome out = qeffect(train + " --set execution.backend=cuda");
  if (out.text.find("has no CUDA backend") == std::string::npos) return;  // it was built in
  CHECK(out.code == 3);
  const Outcome two = ranks(2, train + " --set pipeline.pipeline_model_parallel_size=2 --set execution.transport=nccl");
  CHECK(two.code == 3);
  CHECK(count(two.text, "qeffect: error: execution.transport is nccl, but this build has no CUDA backend") == 1);
}

TEST_CASE("a job of the wrong size exits 3 and says how many ranks it needs") {
  const Scratch dir;
  const std::string train = "train --config " + tiny_config(dir) + " --set pipeline.pipeline_model_parallel_size=2";
  const Outcome alone = shell("env SLURM_NTASKS=2 SLURM_PROCID=0 " + kQeffect + " " + train);
  INFO(alone.text);
  CHECK(alone.code == 3);
  CHECK_THAT(alone.text, ContainsSubstring("needs 2 ranks,"));
  CHECK_THAT(alone.text, ContainsSubstring("mpirun -n 2, or srun with an MPI plugin"));
  const Outcome three = ranks(3, train);
  CHECK(three.code == 3);
  CHECK(count(three.text, "qeffect: error: ") == 1);
  CHECK_THAT(three.text, ContainsSubstring("and got 3; start it with mpirun -n 2."));
}
