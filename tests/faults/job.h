// Small jobs of the executable under mpirun, each in a folder of its own, and what they leave behind.
#pragma once

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "kernels/wire/process.h"
#include "tests/running.h"
#include "tests/unit/scratch.h"

namespace qe::testing {

using Clock = std::chrono::steady_clock;
inline double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

// runtime.timeout_s of a Job, in seconds: a sanitizer makes a rank that is well look late.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kTimeout_s = 20;
#else
inline constexpr int kTimeout_s = 2;
#endif

// A model of three layers on one stage a rank, saved every two steps, that trains for six.
class Job {
 public:
  explicit Job(int ranks = 3) : ranks_(ranks) {
    std::string text;
    for (int i = 0; i < 900; ++i) text += static_cast<char>('a' + (i * i + i / 7) % 26);
    std::ofstream(dir_ / "t.txt") << text;
    REQUIRE(run(kQeffect + " tokenize --input " + (dir_ / "t.txt") + " --output " + (dir_ / "t.bin")).code == 0);
    std::ofstream(dir_ / "c.json") << R"({
      "model": {"num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 64}, "fp8": {"amax_history_len": 4},
      "training": {"seq_length": 16, "global_batch_size": 4, "train_iters": 6, "lr": 1e-3, "lr_warmup_iters": 4},
      "pipeline": {"pipeline_model_parallel_size": )"
                                   << ranks << R"(}, "execution": {"backend": "cpu"}, "runtime": {"timeout_s": )"
                                   << kTimeout_s << R"(},
      "data": {"train": ")" << (dir_ / "t.bin")
                                   << R"("}, "checkpoint": {"interval": 2}})";
  }

  // The arguments of a run in its folder `name`; `faults` as in the config.
  [[nodiscard]] std::string train(const std::string& more = "", const std::vector<std::string>& faults = {},
                                  const std::string& name = "run") const {
    std::string line = "train --config " + (dir_ / "c.json") + " --set report.dir=" + (dir_ / (name + "/report")) +
                       " checkpoint.dir=" + checkpoints(name);
    std::string list;
    for (const std::string& f : faults) list += (list.empty() ? "\"" : ", \"") + f + "\"";
    if (!faults.empty()) line += " --enable-fault-injection --set 'runtime.faults=[" + list + "]'";
    return line + " " + more;
  }
  [[nodiscard]] std::string mpirun(const std::string& arguments, const std::string& launcher_options = "") const {
    return mpiexec(launcher_options) + " -n " + std::to_string(ranks_) + " " + kQeffect + " " + arguments;
  }
  static std::string mpiexec(const std::string& options = "");
  [[nodiscard]] std::string checkpoints(const std::string& name = "run") const { return dir_ / (name + "/ckpt"); }
  [[nodiscard]] const Scratch& dir() const { return dir_; }

  // Processes, but this one, whose command line names the folder and that still run.
  [[nodiscard]] std::vector<int> processes() const {
    std::vector<int> found;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const std::string name = entry.path().filename().string();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      const int pid = std::stoi(name);
      if (pid == ::getpid() || !birth_of(pid)) continue;
      if (text_of(entry.path() / "cmdline").find(dir_.path()) != std::string::npos) found.push_back(pid);
    }
    return found;
  }
  // Whether all of them are gone within the time.
  [[nodiscard]] bool ends_within(double seconds) const {
    const auto start = Clock::now();
    while (!processes().empty()) {
      if (seconds_since(start) > seconds) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return true;
  }

  static const std::string kQeffect;

 private:
  Scratch dir_;
  int ranks_;
};

// What follows `before` up to the end of the word, where it stands last; empty: nowhere.
inline std::string word_after(const std::string& text, const std::string& before) {
  const std::size_t at = text.rfind(before);
  if (at == std::string::npos) return "";
  const std::size_t from = at + before.size();
  return text.substr(from, text.find_first_of(" \n;,", from) - from);
}

}  // namespace qe::testing
