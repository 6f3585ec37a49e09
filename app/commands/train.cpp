#include "app/commands/commands.h"
#include "app/trainer.h"

namespace qe {

int run_train(const Config& config, const StartOptions& options, StopSignals* signals, JobBoard* board,
              const std::string& command_line) {
  Trainer trainer(config, options, signals, board, command_line);
  return static_cast<int>(trainer.run());
}

}  // namespace qe
