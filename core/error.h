// Exception types and the assertion macro. One catch in main() turns each type into its exit code.
// A message is one sentence: the thing (config path, file, rank, action), what was found, what was wanted, what to do.
#pragma once

#include <stdexcept>
#include <string>

namespace qe {

enum class ExitCode : int {
  kOk = 0,
  kRuntime = 1,
  kUsage = 2,
  kConfig = 3,
  kData = 4,
  kCheckpoint = 5,
  kContract = 6,
  kNonFinite = 7,
  kDevice = 8,
  kStoppedBySignal = 75,
};

// Base of every error that a run may end with.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] ExitCode exit_code() const noexcept { return code_; }

 private:
  ExitCode code_;
};

// The command line is wrong.
struct UsageError : Error {
  explicit UsageError(const std::string& m) : Error(ExitCode::kUsage, m) {}
};
// The user's config asks for something that cannot be; names every offending JSON path.
struct ConfigError : Error {
  explicit ConfigError(const std::string& m) : Error(ExitCode::kConfig, m) {}
};
// An action list is malformed or unsafe.
struct ScheduleError : Error {
  explicit ScheduleError(const std::string& m) : Error(ExitCode::kConfig, m) {}
};
// A token file or the data section is unusable.
struct DataError : Error {
  explicit DataError(const std::string& m) : Error(ExitCode::kData, m) {}
};
// What every rank found alike, from what all told each other: said once, and the job ends in order.
struct AgreedError : Error {
  using Error::Error;
};
struct CheckpointError : AgreedError {
  explicit CheckpointError(const std::string& m) : AgreedError(ExitCode::kCheckpoint, m) {}
};
// Loss or gradients are not finite and the policy says stop.
struct NonFiniteError : AgreedError {
  explicit NonFiniteError(const std::string& m) : AgreedError(ExitCode::kNonFinite, m) {}
};
// A device, CUDA, NCCL or MPI call failed, or a deadline passed.
struct DeviceError : Error {
  explicit DeviceError(const std::string& m) : Error(ExitCode::kDevice, m) {}
};
// Throws std::logic_error naming file and line: a bug of ours, never the user's.
[[noreturn]] void expectation_failed(const char* condition, const char* why, const char* file, int line);

}  // namespace qe

#define QE_EXPECTS(condition, why)                                                   \
  do {                                                                               \
    if (!(condition)) ::qe::expectation_failed(#condition, why, __FILE__, __LINE__); \
  } while (false)
