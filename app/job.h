// One job of MPI ranks from start to end: agreement before anything is allocated, then the body, then the exit code.
// Decides who prints an error: what several ranks have wrong is printed once, and nothing is wrong silently.
#pragma once

#include <exception>
#include <functional>
#include <string>

#include "app/config.h"
#include "kernels/wire/job_board.h"

namespace qe {

void print_error(const std::string& message);
std::string message_of(const std::exception&);  // what a user can make use of

struct JobStart {
  Config config;
  std::string identity;  // what every rank must have alike, in lines
};

using JobBody = std::function<int(const Config&, JobBoard*)>;

// `prepare` reads and checks what this rank was given, before MPI_Init; what it throws is a refusal. A process that no
// launcher started ends there. Otherwise the ranks tell each other how they fared: with a refusal anywhere, or ranks
// that have different things in mind, none goes on, and rank 0 prints each message once, naming the ranks if not all
// have it. Then `body` runs between MPI_Init and MPI_Finalize on config.ranks() ranks. Returns the exit code;
// a rank that fails alone ends the job with its own.
// No process of the job outlives it (app/watchdog.h), and no failure keeps the others waiting
// (kernels/wire/job_board.h).
int run_job(const std::function<JobStart()>& prepare, const JobBody& body);

}  // namespace qe
