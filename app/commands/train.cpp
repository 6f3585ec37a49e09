#include "app/commands/commands.h"
#include "app/trainer.h"

namespace qe {

int run_train(const Config& config, const std::string& command_line) {
  Trainer trainer(config, command_line);
  trainer.run();
  return 0;
}

}  // namespace qe
