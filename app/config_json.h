// JSON text and "--set" overrides → one JSON object, strictly. Knows syntax only; names and values are checked
// elsewhere.
#pragma once

#include <string>
#include <vector>

#include "app/config_faults.h"
#include "app/config_keys.h"

namespace qe {

// Comments (// and /* */) are allowed; a byte order mark, a trailing comma and a key given twice are not.
// Throws ConfigError when the text is no JSON object; adds a fault for each duplicate.
Json read_config_json(const std::string& text, const std::string& source_name, Faults& faults);

// "a.b=value" replaces or adds a.b; the value is JSON, or else a string. Later ones win.
// Throws UsageError when an override has another form.
void apply_override(Json& root, const std::string& override_text);

}  // namespace qe
