#include "app/job.h"

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <optional>
#include <thread>
#include <vector>

#include "app/config_faults.h"
#include "app/watchdog.h"
#include "core/error.h"

namespace qe {
namespace {

constexpr std::size_t kMostRanksNamed = 8;
constexpr std::size_t kMostShown = 100;  // bytes of what a rank has
constexpr auto kPoll = std::chrono::milliseconds(1);

struct Verdict {
  int code = 0;
  std::string text;  // the refusal, or with code 0 what the rank has in mind
};

bool is_set(const char* variable) { return std::getenv(variable) != nullptr; }
bool zero_or_unset(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr || std::string(value) == "0";
}

// Open MPI, PMI-2 and PMIx tell a process so that it is a rank.
bool has_launcher() { return is_set("OMPI_COMM_WORLD_SIZE") || is_set("PMI_SIZE") || is_set("PMIX_RANK"); }

// Tasks that srun started without MPI know nothing of each other: one of each host speaks.
bool speaks_for_its_host() { return zero_or_unset("SLURM_LOCALID"); }

// Every rank's text, on every rank. In MPI alone: the transports are made later.
std::vector<std::string> gather(const std::string& mine, Watchdog& watchdog, double timeout_s) {
  const Watchdog::Limit limit(watchdog, timeout_s, "the first exchange between the ranks of the job");
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int length = static_cast<int>(mine.size());
  std::vector<int> lengths(static_cast<std::size_t>(size)), starts(lengths);
  MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, MPI_COMM_WORLD);
  int total = 0;
  for (std::size_t r = 0; r < lengths.size(); ++r) starts[r] = std::exchange(total, total + lengths[r]);
  std::string joined(static_cast<std::size_t>(total), '\0');
  MPI_Allgatherv(mine.data(), length, MPI_CHAR, joined.data(), lengths.data(), starts.data(), MPI_CHAR, MPI_COMM_WORLD);
  std::vector<std::string> all;
  for (std::size_t r = 0; r < lengths.size(); ++r) {
    all.push_back(joined.substr(static_cast<std::size_t>(starts[r]), static_cast<std::size_t>(lengths[r])));
  }
  return all;
}

std::vector<Verdict> exchange(const Verdict& mine, Watchdog& watchdog, double timeout_s) {
  std::vector<Verdict> all;
  for (const std::string& text : gather(std::to_string(mine.code) + " " + mine.text, watchdog, timeout_s)) {
    const std::size_t space = text.find(' ');
    all.push_back({std::stoi(text.substr(0, space)), text.substr(space + 1)});
  }
  return all;
}

std::string named(const std::vector<std::size_t>& ranks) {
  std::vector<std::string> names;
  for (const std::size_t r : ranks) names.push_back(std::to_string(r));
  if (names.size() > kMostRanksNamed) {
    const std::size_t others = names.size() - kMostRanksNamed;
    names.resize(kMostRanksNamed);
    names.push_back(std::to_string(others) + " more");
  }
  return (names.size() == 1 ? "rank " : "ranks ") + join(names) + ": ";
}

// The job's exit code, alike on every rank; 0: all go on. Rank 0 prints.
int agree(const Verdict& mine, Watchdog& watchdog, double timeout_s) {
  const std::vector<Verdict> all = exchange(mine, watchdog, timeout_s);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const bool speaks = rank == 0 && (all.size() > 1 || speaks_for_its_host());
  std::map<std::string, std::vector<std::size_t>> refusals;
  int code = 0;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].code == 0) continue;
    refusals[all[r].text].push_back(r);
    if (code == 0) code = all[r].code;
  }
  for (const auto& [message, ranks] : refusals) {
    if (speaks) print_error((ranks.size() == all.size() ? "" : named(ranks)) + message);
  }
  if (code != 0) return code;
  const auto other = std::find_if(all.begin(), all.end(), [&](const Verdict& v) { return v.text != all.front().text; });
  if (other == all.end()) return 0;
  auto [first, here] = first_difference(all.front().text, other->text);
  first = shortened(first, kMostShown), here = shortened(here, kMostShown);
  if (speaks) {
    print_error("Rank " + std::to_string(other - all.begin()) + " has " + here + " where rank 0 has " + first +
                "; give every rank the same file and the same options.");
  }
  return static_cast<int>(ExitCode::kConfig);
}

// Whether the job has the ranks that the config needs; rank 0 says it if not.
bool check_size(const Config& config, int rank, int size) {
  if (size == config.ranks()) return true;
  const std::string wanted = std::to_string(config.ranks());
  if (rank == 0 && speaks_for_its_host()) {
    print_error("The config needs " + counted(config.ranks(), "rank") +
                ", pipeline.pipeline_model_parallel_size x parallel.data, and got " + std::to_string(size) +
                "; start it with mpirun -n " + wanted +
                (size == 1 && is_set("SLURM_NTASKS") ? ", or srun with an MPI plugin (--mpi=pmix)." : "."));
  }
  return false;
}

// Messages of the transports begin with their rank already; a job of one has no use for it.
void print_of_rank(int rank, int size, const std::string& message) {
  if (size == 1) return print_error(message);
  const std::string name = "rank " + std::to_string(rank);
  const bool named = message.starts_with(name + ":") || message.starts_with(name + " ");
  print_error(named ? message : name + ": " + message);
}

constexpr double kOthersTell_s = 1;  // how long a rank that failed lets the others of its host say where they were

// An exception leaves through MPI_Abort, or ranks of other hosts would wait for this one.
int abort_job(const std::string& message, int code, JobBoard& board, Watchdog& watchdog, int size) {
  watchdog.begin_abort(code);
  board.fail(code, message);
  if (size == 1) return code;  // nobody waits
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(kOthersTell_s);
  while (!board.all_told() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(kPoll);
  std::fflush(nullptr);
  MPI_Abort(MPI_COMM_WORLD, board.failure()->code);
  return code;
}

// Ranks of this host wait for each other here, where a death shows, and only then in MPI_Finalize. Looking for messages
// is what makes MPI deliver this rank's last ones, which others may wait for.
void leave_together(JobBoard& board) {
  board.leave();
  while (!board.others_left()) {
    board.expect_no_failure();
    int any = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &any, MPI_STATUS_IGNORE);
    std::this_thread::sleep_for(kPoll);
  }
}

struct Ending {
  int code;
  bool one_host = true;
};

Ending run_body(const Config& config, const JobBody& body, Watchdog& watchdog) {
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (!check_size(config, rank, size)) return {static_cast<int>(ExitCode::kConfig)};
  JobBoard board(
      rank, [&](const std::string& mine) { return gather(mine, watchdog, config.runtime.timeout_s); },
      [&](const std::string& message) { print_of_rank(rank, size, message); });
  struct Watched {
    explicit Watched(Watchdog& w, JobBoard& b) : watchdog(w) { watchdog.watch(&b); }
    ~Watched() { watchdog.watch(nullptr); }
    Watchdog& watchdog;
  } watched(watchdog, board);
  try {
    int code = 0;
    try {
      code = body(config, &board);
    } catch (const AgreedError& e) {
      if (rank == 0) print_error(e.what());
      code = static_cast<int>(e.exit_code());
    }
    leave_together(board);
    return {code, board.other_host().empty()};
  } catch (const Error& e) {
    return {abort_job(e.what(), static_cast<int>(e.exit_code()), board, watchdog, size)};
  } catch (const std::exception& e) {
    return {abort_job(message_of(e), static_cast<int>(ExitCode::kRuntime), board, watchdog, size)};
  }
}

}  // namespace

std::string message_of(const std::exception& e) {
  if (dynamic_cast<const std::bad_alloc*>(&e) == nullptr) return e.what();
  return "The host has no memory left; make the model or the batch smaller, or raise the process's limit.";
}

void print_error(const std::string& message) { std::fprintf(stderr, "qeffect: error: %s\n", message.c_str()); }

int run_job(const std::function<JobStart()>& prepare, const JobBody& body) {
  std::optional<JobStart> start;
  Verdict verdict;
  try {
    start = prepare();
    verdict.text = start->identity;
  } catch (const Error& e) {
    verdict = {static_cast<int>(e.exit_code()), e.what()};
  } catch (const std::exception& e) {
    verdict = {static_cast<int>(ExitCode::kRuntime), e.what()};
  }
  if (verdict.code != 0 && !has_launcher()) {
    if (speaks_for_its_host()) print_error(verdict.text);
    return verdict.code;
  }
  Watchdog watchdog(has_launcher());
  const double timeout_s = start ? start->config.runtime.timeout_s : RuntimeSection{}.timeout_s;
  {
    const Watchdog::Limit limit(watchdog, timeout_s, "MPI_Init, in which the ranks of the job meet,");
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  }
  Ending ending{agree(verdict, watchdog, timeout_s)};
  if (ending.code == 0) ending = run_body(start->config, body, watchdog);
  // Rank 0 may have long work of its own at the end; a rank of another host cannot see that it lives.
  std::optional<Watchdog::Limit> limit;
  const bool good = ending.code == 0;
  if (ending.one_host) {
    limit.emplace(watchdog, timeout_s, good ? "MPI_Finalize" : "",
                  good ? ExitCode::kDevice : static_cast<ExitCode>(ending.code));
  }
  MPI_Finalize();
  return ending.code;
}

}  // namespace qe
