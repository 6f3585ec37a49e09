// Defaults that follow from other keys, and contradictions between keys. Ranges of single keys are in the key table.
#pragma once

#include <functional>
#include <set>
#include <string>

#include "app/config.h"
#include "app/config_faults.h"

namespace qe {

using Given = std::set<std::string, std::less<>>;  // the keys that the user set

// Reads the file of a csv schedule into pipeline.csv_lists; a fault of the file is one of pipeline.schedule_csv.
void read_schedule_file(Config&, Faults&);

// Fills in the keys that were not given and whose default depends on others.
void resolve_defaults(Config&, const Given&, const Faults&);

// Adds one line for each contradiction, at the key that should change; silent about keys that already have a fault.
void check_config(const Config&, const Given&, Faults&);

}  // namespace qe
