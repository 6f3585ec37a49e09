// The machine and the libraries of this process, for reports.
#pragma once

#include <string>

namespace qe {

std::string version_text();      // "qeffect 0.1.0"
std::string environment_json();  // one JSON object: host, CPU, compiler, library versions

}  // namespace qe
