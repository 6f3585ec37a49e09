// Restart as a user does it: the same command again after a kill or a signal, refusals, and inspect.
#include <csignal>
#include <filesystem>
#include <fstream>
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
std::string ranks(int n, const std::string& arguments) {
  return std::string(QE_MPIEXEC) + " --oversubscribe -n " + std::to_string(n) + " " + kQeffect + " " + arguments;
}
Outcome qeffect(const std::string& arguments) { return run(kQeffect + " " + arguments); }

// Three shards of different length, and a small model on two ranks; every run gets folders of its own.
void make_data(const Scratch& dir) {
  for (const auto& [name, length] : {std::pair{"a", 700}, {"b", 1900}, {"c", 300}, {"valid", 200}}) {
    std::string text;
    for (int i = 0; i < length; ++i) text += static_cast<char>('a' + (i * i + i / 7 + length) % 26);
    std::ofstream(dir / (std::string(name) + ".txt")) << text;
    REQUIRE(qeffect("tokenize --input " + (dir / (std::string(name) + ".txt")) + " --output " +
                    (dir / (std::string(name == std::string("valid") ? "" : "train_") + name + ".bin")))
                .code == 0);
  }
  std::ofstream(dir / "c.json") << R"({
    "model": {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 64},
    "fp8": {"amax_history_len": 4},
    "training": {"seq_length": 16, "global_batch_size": 24, "train_iters": 80, "lr": 3e-3, "lr_schedule": "cosine",
                 "lr_warmup_iters": 15, "min_lr": 1e-4, "eval_interval": 7},
    "pipeline": {"pipeline_model_parallel_size": 2, "schedule": "zbv"},
    "execution": {"backend": "cpu"},
    "data": {"train": ")" << (dir / "train_*.bin")
                                << R"(", "valid": ")" << (dir / "valid.bin") << R"("}, "checkpoint": {"interval": 5}})";
}

std::string train(const Scratch& dir, const std::string& name) {
  return "train --config " + (dir / "c.json") + " --set report.dir=" + (dir / (name + "/report")) +
         " --set checkpoint.dir=" + (dir / (name + "/checkpoints"));
}

std::vector<Json> metrics(const std::string& folder) { return metrics_of(folder + "/report/metrics.jsonl"); }
Json report(const std::string& folder) { return Json::parse(text_of(folder + "/report/report.json")); }

}  // namespace

TEST_CASE("killed once and asked to stop twice, the same command ends as the run that nothing interrupted", "[slow]") {
  const Scratch dir;
  make_data(dir);
  const Outcome whole = run(ranks(2, train(dir, "whole")));
  INFO(whole.text);
  REQUIRE(whole.code == 0);

  const std::string again = ranks(2, train(dir, "parts") + " --resume");
  Running killed(again);
  REQUIRE(killed.reads("step     12/80"));
  for (const pid_t rank : killed.children()) ::kill(rank, SIGKILL);
  CHECK(killed.finish().code != 0);

  Running told_one(again);  // one rank alone is told
  REQUIRE(told_one.reads("resumed from " + (dir / "parts/checkpoints/step_000000")));
  REQUIRE(told_one.reads("step     30/80"));
  const std::vector<pid_t> two = told_one.children();
  REQUIRE(two.size() == 2);
  ::kill(two[1], SIGTERM);
  const Outcome stopped = told_one.finish();
  INFO(stopped.text);
  CHECK(stopped.code == 75);
  const Json half = report(dir / "parts");
  CHECK(half["status"] == "stopped");
  CHECK(half["resumed"]["step"].get<int>() % 5 == 0);

  Running told_launcher(again);
  REQUIRE(told_launcher.reads("step     50/80"));
  ::kill(told_launcher.pid(), SIGUSR1);
  CHECK(told_launcher.finish().code == 75);

  REQUIRE(run(again).code == 0);
  CHECK(metrics(dir / "parts") == metrics(dir / "whole"));
  const Outcome done = run(again);  // nothing is left to do
  INFO(done.text);
  REQUIRE(done.code == 0);
  CHECK(count(done.text, "resumed from") == 1);
  CHECK(metrics(dir / "parts") == metrics(dir / "whole"));
  const Json a = report(dir / "whole"), b = report(dir / "parts");
  for (const char* part : {"final", "initial", "baselines", "skipped_steps"}) CHECK(a[part] == b[part]);
  CHECK(b["status"] == "completed");
  CHECK(qeffect("inspect --diff " + (dir / "whole/checkpoints") + " " + (dir / "parts/checkpoints")).code == 0);
}

TEST_CASE("a run goes on under another cut, with a new learning rate where that is said, and tells the report") {
  const Scratch dir;
  make_data(dir);
  const std::string run_of = train(dir, "run") + " --set training.train_iters=10 training.lr_warmup_iters=8";
  REQUIRE(run(ranks(2, run_of)).code == 0);
  const std::string alone = run_of + " --set pipeline.pipeline_model_parallel_size=1 --set pipeline.schedule=1f1b";
  const Json whole = report(dir / "run");

  const Outcome five = qeffect(alone + " --resume 5");
  INFO(five.text);
  REQUIRE(five.code == 0);
  CHECK(report(dir / "run")["final"] == whole["final"]);

  const Outcome refused = qeffect(alone + " --resume 5 --set training.lr=1e-3 --set optimizer.adam_eps=1e-6");
  CHECK(refused.code == 5);
  CHECK_THAT(refused.text, ContainsSubstring("training.lr: stored 0.003, now 0.001"));
  CHECK_THAT(refused.text, ContainsSubstring("optimizer.adam_eps"));
  CHECK(count(refused.text, "qeffect: error: ") == 1);
  const Outcome taken = qeffect(alone + " --resume 5 --set training.lr=1e-3 --override training.lr");
  INFO(taken.text);
  REQUIRE(taken.code == 0);
  const Json resumed = report(dir / "run")["resumed"];
  CHECK(resumed["overridden"] == Json::parse(R"([{"key": "training.lr", "stored": 0.003, "now": 0.001}])"));
  CHECK(resumed["changed"].size() >= 2);
  std::vector<Json> steps = metrics(dir / "run");
  std::erase_if(steps, [](const Json& j) { return j["event"] != "step"; });
  REQUIRE(steps.size() == 10);
  CHECK(steps[5]["lr"].get<double>() == 1e-3 * 6 / 8);
}

TEST_CASE("what cannot be resumed is refused, once, with what is there") {
  const Scratch dir;
  make_data(dir);
  const std::string two =
      train(dir, "run") + " --set training.train_iters=4 training.lr_warmup_iters=0 checkpoint.interval=2";
  REQUIRE(run(ranks(2, two + " --resume latest")).code == 0);  // nothing there: a fresh start
  const Outcome missing = run(ranks(2, two + " --resume 3"));
  CHECK(missing.code == 5);
  CHECK(count(missing.text, "qeffect: error: ") == 1);
  CHECK_THAT(missing.text, ContainsSubstring("has steps 2 and 4"));
  CHECK(qeffect("train --config " + (dir / "c.json") + " --resume").code == 3);
  CHECK(run(ranks(2, two + " --resume --override training.l")).code == 2);
  CHECK(run(ranks(2, two + " --set checkpoint.keep_last=0")).code == 3);
  CHECK(run(ranks(2, two + " --init-from " + (dir / "nowhere"))).code == 5);
  // The config is refused before the job starts; a shard that is gone makes both ranks fall back.
  std::filesystem::remove(dir / "run/checkpoints/step_00000004/rank_00001.safetensors");
  const Outcome back = run(ranks(2, two + " --resume"));
  INFO(back.text);
  CHECK(back.code == 0);
  CHECK_THAT(back.text, ContainsSubstring("passed over: ") && ContainsSubstring("rank_00001.safetensors"));
  CHECK_THAT(back.text, ContainsSubstring("resumed from " + (dir / "run/checkpoints/step_00000002")));
}

TEST_CASE("weights start a run of their own: step 1, and the loss that they were saved with") {
  const Scratch dir;
  make_data(dir);
  const std::string alone = " --set pipeline.pipeline_model_parallel_size=1 --set pipeline.schedule=1f1b";
  REQUIRE(qeffect(train(dir, "old") + alone + " --set training.train_iters=40").code == 0);
  const Outcome fresh =
      qeffect(train(dir, "new") + alone + " --set training.train_iters=2 training.lr_warmup_iters=0 --init-from " +
              (dir / "old/checkpoints/step_00000040"));
  INFO(fresh.text);
  REQUIRE(fresh.code == 0);
  const Json old_run = report(dir / "old"), new_run = report(dir / "new");
  CHECK(new_run["steps"] == 2);
  CHECK(new_run["resumed"].is_null());
  CHECK(new_run["initial"]["train_loss"].get<double>() < old_run["final"]["valid_loss"].get<double>() + 0.3);
  CHECK(new_run["initial"]["train_loss"].get<double>() < old_run["initial"]["train_loss"].get<double>() - 1.0);
}

TEST_CASE("inspect prints, verifies and compares") {
  const Scratch dir;
  make_data(dir);
  REQUIRE(run(ranks(2, train(dir, "run") +
                           " --set training.train_iters=2 training.lr_warmup_iters=0 checkpoint.interval=1"))
              .code == 0);
  const std::string store = dir / "run/checkpoints", second = store + "/step_00000002";
  const Outcome shown = qeffect("inspect " + store + " --verify");
  INFO(shown.text);
  CHECK(shown.code == 0);
  for (const char* part : {"step 2, epoch 2", "rank_00001.safetensors", "master.layers.3.mlp.fc2.weight",
                           "layers.0.fc1", "nlohmann_json", "verified: 2 files"}) {
    CHECK_THAT(shown.text, ContainsSubstring(part));
  }
  CHECK(qeffect("inspect --diff " + second + " " + store).code == 0);
  const Outcome differ = qeffect("inspect --diff " + store + "/step_00000001 " + second);
  CHECK(differ.code == 1);
  CHECK_THAT(differ.text, ContainsSubstring("master.layers.0.mlp.fc1.weight") && ContainsSubstring("elements differ"));

  std::string bytes = text_of(second + "/rank_00000.safetensors");
  bytes[bytes.size() - 3] = static_cast<char>(bytes[bytes.size() - 3] ^ 1);
  std::ofstream(second + "/rank_00000.safetensors", std::ios::binary) << bytes;
  const Outcome damaged = qeffect("inspect " + second + " --verify");
  CHECK(damaged.code == 5);
  CHECK_THAT(damaged.text, ContainsSubstring("rank_00000.safetensors has the XXH3 digest"));
  CHECK(qeffect("inspect " + (dir / "nowhere")).code == 5);
  CHECK(qeffect("inspect").code == 2);
}
