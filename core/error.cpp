#include "core/error.h"

namespace qe {

void expectation_failed(const char* condition, const char* why, const char* file, int line) {
  throw std::logic_error(std::string(file) + ":" + std::to_string(line) + ": internal error: " + why + " (" +
                         condition + " does not hold); please report this");
}

}  // namespace qe
