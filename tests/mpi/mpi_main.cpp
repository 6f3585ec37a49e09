// Owns MPI around Catch2: every rank fails when one does.
#define CATCH_CONFIG_RUNNER
#include <mpi.h>

#include "tests/catch.h"

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  int failed = Catch::Session().run(argc, argv) != 0 ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return failed;
}
