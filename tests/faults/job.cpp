#include "tests/faults/job.h"

namespace qe::testing {

// Where the build put them.
const std::string Job::kQeffect = QE_QEFFECT;
std::string Job::mpiexec(const std::string& options) { return std::string(QE_MPIEXEC) + " --oversubscribe " + options; }

}  // namespace qe::testing
