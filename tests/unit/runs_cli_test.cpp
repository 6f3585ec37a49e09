// Whole runs as a user starts them: every one ends, repeats itself, and reads its own part of the data.
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/running.h"
#include "tests/unit/run_metrics.h"
#include "tests/unit/scratch.h"

namespace {

using Json = nlohmann::json;

const std::string kQeffect = QE_QEFFECT;

// Ended after a minute, with code 124, should it hang.
Outcome within_a_minute(const std::string& command) { return run("timeout 60 " + command); }

Outcome ranks(int n, const std::string& arguments) {
  return within_a_minute(std::string(QE_MPIEXEC) + " --oversubscribe -n " + std::to_string(n) + " " + kQeffect + " " +
                         arguments);
}

// Four small layers on text whose windows differ.
void make_run(const Scratch& dir) {
  std::string text;
  for (int i = 0; i < 4000; ++i) text += static_cast<char>('a' + (i * i + i / 13) % 26);
  std::ofstream(dir / "t.txt") << text;
  REQUIRE(within_a_minute(kQeffect + " tokenize --input " + (dir / "t.txt") + " --output " + (dir / "t.bin")).code ==
          0);
  std::ofstream(dir / "c.json") << R"({
    "model": {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48},
    "fp8": {"amax_history_len": 4},
    "training": {"seq_length": 16, "global_batch_size": 8, "train_iters": 4, "lr": 1e-3},
    "execution": {"backend": "cpu"},
    "data": {"train": ")" << (dir / "t.bin")
                                << "\"}}";
}

std::string train(const Scratch& dir, const std::string& name, const std::string& settings) {
  return "train --config " + (dir / "c.json") + " --set report.dir=" + (dir / name) + " --set " + settings;
}

std::vector<Json> metrics(const std::string& folder) { return metrics_of(folder + "/metrics.jsonl"); }

// Digests of all that a run's last checkpoint stores, by name.
std::map<std::string, std::string> stored(const std::string& folder, int step) {
  std::array<char, 32> name{};
  std::snprintf(name.data(), name.size(), "step_%08d", step);
  std::ifstream file(folder + "/" + name.data() + "/manifest.json");
  const Json manifest = Json::parse(file);
  std::map<std::string, std::string> digests;
  for (const Json& t : manifest["tensors"]) digests[t["name"]] = t["xxh3"];
  return digests;
}

}  // namespace

TEST_CASE("a job with more or fewer ranks than pipelines x replicas is refused at once with both numbers") {
  const Scratch dir;
  make_run(dir);
  for (const int n : {1, 3, 5}) {
    const Outcome out = ranks(n, train(dir, "r", "pipeline.pipeline_model_parallel_size=2 parallel.data=2"));
    INFO(out.text);
    CHECK(out.code == 3);
    CHECK_THAT(out.text, ContainsSubstring("needs 4 ranks") && ContainsSubstring("and got " + std::to_string(n)));
  }
}

TEST_CASE("replicas read parts of the batch that together are one replica's, and a replica's stages the same part") {
  // In FP32 nothing but the order of sums tells the runs apart; another window anywhere would show in the first loss.
  const Scratch dir;
  make_run(dir);
  REQUIRE(ranks(1, train(dir, "one", "precision.compute=fp32")).code == 0);
  const std::vector<Json> one = metrics(dir / "one");
  REQUIRE(one.size() == 4);
  for (const int pipeline : {2, 4}) {
    const std::string name = "pp" + std::to_string(pipeline);
    const Outcome out =
        ranks(2 * pipeline, train(dir, name,
                                  "precision.compute=fp32 parallel.data=2 pipeline.pipeline_model_parallel_size=" +
                                      std::to_string(pipeline)));
    INFO(out.text);
    REQUIRE(out.code == 0);
    const std::vector<Json> two = metrics(dir / name);
    REQUIRE(two.size() == 4);
    for (std::size_t step = 0; step < 4; ++step) {
      CHECK(std::fabs(two[step]["loss"].get<double>() / one[step]["loss"].get<double>() - 1.0) < 1e-6);
      CHECK(std::fabs(two[step]["grad_norm"].get<double>() / one[step]["grad_norm"].get<double>() - 1.0) < 1e-4);
    }
  }
}

TEST_CASE("three fresh jobs of each schedule and mode have the same losses, norms and stored bytes", "[slow]") {
  const Scratch dir;
  make_run(dir);
  std::vector<Json> lines;
  std::map<std::string, std::string> tensors;
  for (const char* schedule : {"interleaved_1f1b", "zbv"}) {
    for (const char* mode : {"eager", "graph"}) {
      for (int repeat = 0; repeat < 3; ++repeat) {
        const std::string name = std::string(schedule) + mode + std::to_string(repeat);
        const Outcome out = ranks(2, train(dir, name,
                                           "training.train_iters=50 pipeline.pipeline_model_parallel_size=2 "
                                           "pipeline.virtual_pipeline_model_parallel_size=2 pipeline.schedule=" +
                                               std::string(schedule) + " execution.mode=" + mode +
                                               " checkpoint.dir=" + (dir / (name + "c"))));
        INFO(name << out.text);
        REQUIRE(out.code == 0);
        if (lines.empty()) {
          lines = metrics(dir / name);
          tensors = stored(dir / (name + "c"), 50);
          REQUIRE(lines.size() == 50);
          REQUIRE(tensors.size() > 100);
        }
        CHECK(metrics(dir / name) == lines);
        CHECK(stored(dir / (name + "c"), 50) == tensors);
      }
    }
  }
}

TEST_CASE("a hundred jobs of one step on two and on four ranks all end by themselves with 0", "[slow]") {
  const Scratch dir;
  make_run(dir);
  for (int job = 0; job < 100; ++job) {
    const int n = job % 2 == 0 ? 2 : 4;
    const Outcome out =
        ranks(n, train(dir, "r" + std::to_string(job),
                       "training.train_iters=1 pipeline.schedule=1f1b pipeline.pipeline_model_parallel_size=" +
                           std::to_string(n)));
    INFO("job " << job << out.text);
    REQUIRE(out.code == 0);
  }
}
