// What runtime.faults may say, strictly read.
#include "app/injected_faults.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <map>
#include <set>
#include <sstream>
#include <string_view>

#include "app/config.h"
#include "app/pipeline_plan.h"
#include "core/error.h"

namespace qe {
namespace {

const std::vector<std::string> kFileOperations{"create", "write", "fsync", "close", "rename", "sync", "remove"};

// Kinds, the keys that each must have, and those that it may have.
struct Form {
  FaultKind kind;
  std::vector<std::string> required, allowed;
};
const std::map<std::string, Form>& forms() {
  static const std::map<std::string, Form> table{
      {"fail", {FaultKind::kFail, {"at"}, {"rank", "step"}}},
      {"delay", {FaultKind::kDelay, {"at", "seconds"}, {"rank", "step", "file", "byte"}}},
      {"crash", {FaultKind::kCrash, {"at"}, {"rank", "step", "file", "byte"}}},
      {"stop", {FaultKind::kStop, {"at"}, {"rank", "step", "file", "byte"}}},
      {"drop", {FaultKind::kDrop, {"at"}, {"rank", "step"}}},
      {"stale", {FaultKind::kStale, {"at", "layout"}, {"rank", "step"}}},
      {"nan", {FaultKind::kNan, {"at"}, {"matrix", "rank", "step"}}},
      {"alias", {FaultKind::kAlias, {"stage", "matrix"}, {"microbatch", "rank"}}},
      {"error", {FaultKind::kError, {"at", "code"}, {"rank", "step", "file", "byte"}}},
  };
  return table;
}

template <class T>
std::optional<T> number(const std::string& text, T least, T most) {
  T value{};
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size() || value < least || value > most) return std::nullopt;
  return value;
}

// Throws ConfigError with a sentence that begins with the entry.
class Reader {
 public:
  Reader(const std::string& text, const Config& config) : config_(config) { fault_.text = text; }

  InjectedFault read() {
    std::istringstream words(fault_.text);
    std::string kind, word;
    words >> kind;
    const auto form = forms().find(kind);
    if (form == forms().end()) {
      std::vector<std::string> names;
      for (const auto& [name, unused] : forms()) names.push_back(name);
      refuse("begins with no kind of fault; there are " + join(names));
    }
    fault_.kind = form->second.kind;
    std::vector<std::string> given;
    while (words >> word) given.push_back(take(word, form->second, kind, given));
    for (const std::string& key : form->second.required) {
      if (std::find(given.begin(), given.end(), key) == given.end()) refuse("needs " + key + "=");
    }
    check_place();
    return fault_;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw ConfigError("\"" + shortened(fault_.text, 80) + "\" " + what + "; see docs/failures.md.");
  }

  std::string take(const std::string& word, const Form& form, const std::string& kind,
                   const std::vector<std::string>& given) {
    const std::size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    const auto among = [&](const std::vector<std::string>& keys) {
      return std::find(keys.begin(), keys.end(), key) != keys.end();
    };
    if (equals == std::string::npos || (!among(form.required) && !among(form.allowed))) {
      std::vector<std::string> keys = form.required;
      keys.insert(keys.end(), form.allowed.begin(), form.allowed.end());
      refuse("has " + word + ", and " + kind + " takes " + join(keys) + ", each as key=value");
    }
    if (among(given)) refuse("has " + key + " twice");
    set(key, word.substr(equals + 1));
    return key;
  }

  template <class T, class To>
  void set_number(const std::string& key, const std::string& value, T least, T most, To& to) {
    const auto found = number<T>(value, least, most);
    if (!found) {
      std::ostringstream range;
      range << "has " << key << "=" << value << ", wanted " << least << " to " << most;
      refuse(range.str());
    }
    to = static_cast<To>(*found);
  }

  void set(const std::string& key, const std::string& value) {
    std::int64_t n = 0;
    if (key == "rank") {
      set_number<std::int64_t>(key, value, 0, config_.ranks() - 1, n);
      fault_.rank = static_cast<int>(n);
    } else if (key == "step") {
      set_number<std::int64_t>(key, value, 0, config_.training.train_iters, n);
      fault_.step = static_cast<std::uint32_t>(n);
    } else if (key == "stage") {
      set_number<std::int64_t>(key, value, 0, config_.shape().ranks * config_.shape().chunks_per_rank - 1,
                               fault_.stage);
    } else if (key == "matrix" && fault_.kind == FaultKind::kAlias) {
      set_number<std::int64_t>(key, value, 1, 1000000, fault_.matrix);  // an alias of the one before
    } else if (key == "microbatch") {
      set_number<std::int64_t>(key, value, 0, config_.microbatches() - 1, fault_.microbatch);
    } else if (key == "matrix") {
      set_number<std::int64_t>(key, value, 0, 1000000, fault_.matrix);
    } else if (key == "seconds") {
      set_number<double>(key, value, 0, 1e6, fault_.seconds);
    } else if (key == "byte") {
      set_byte(value);
    } else if (key == "file") {
      fault_.file = value;
    } else if (key == "at") {
      set_place(value);
    } else if (key == "code") {
      set_choice<int>(key, value, {{"ENOSPC", ENOSPC}, {"EIO", EIO}}, fault_.error);
    } else if (key == "layout") {
      set_choice<CacheLayout>(key, value,
                              {{"rowwise", CacheLayout::kRowwise},
                               {"columnwise", CacheLayout::kColumnwise},
                               {"bf16_copies", CacheLayout::kBf16Copies}},
                              fault_.layout);
    }
  }

  template <class T>
  void set_choice(const std::string& key, const std::string& value, const std::map<std::string, T>& choices, T& to) {
    const auto found = choices.find(value);
    if (found != choices.end()) {
      to = found->second;
      return;
    }
    std::vector<std::string> names;
    for (const auto& [name, unused] : choices) names.push_back(name);
    refuse("has " + key + "=" + value + ", wanted one of " + join(names));
  }

  void set_byte(const std::string& value) {
    if (value == "middle" || value == "last") {
      fault_.byte = value == "middle" ? -1 : -2;
    } else {
      std::int64_t n = 0;
      set_number<std::int64_t>("byte", value, 0, std::int64_t{1} << 60, n);
      fault_.byte = n;
    }
  }

  void set_place(const std::string& value) {
    const bool known = value == "optimizer" ||
                       std::find(kFileOperations.begin(), kFileOperations.end(), value) != kFileOperations.end();
    if (known) {
      fault_.operation = value;
      return;
    }
    try {
      fault_.action = parse_action(value);
    } catch (const ScheduleError&) {
      refuse("has at=" + value +
             ", wanted an action as 2I0, optimizer, or a call for a file: " + join(kFileOperations));
    }
  }

  // What kinds and places go together.
  void check_place() const {
    const bool of_file = !fault_.operation.empty() && fault_.operation != "optimizer";
    if (fault_.kind == FaultKind::kError && !of_file) refuse("needs a call for a file at at=");
    if (fault_.kind == FaultKind::kFail && of_file) refuse("fails no call for a file; error does");
    if (!of_file && (!fault_.file.empty() || fault_.byte)) refuse("has file= or byte= for what is no call for a file");
    if (fault_.byte && fault_.operation != "write") refuse("has byte= for what is no write");
    const auto at_action = [&](std::initializer_list<ActionKind> kinds, const char* wanted) {
      const bool fits = fault_.action && std::find(kinds.begin(), kinds.end(), fault_.action->kind) != kinds.end();
      if (!fits) refuse(std::string("needs ") + wanted + " at at=");
    };
    using enum ActionKind;
    if (fault_.kind == FaultKind::kDrop) at_action({kWeightGrad}, "a W");
    if (fault_.kind == FaultKind::kNan) at_action({kWeightGrad, kFullBackward}, "a W or a B");
    if (fault_.kind == FaultKind::kStale) at_action({kForward, kInputGrad, kFullBackward}, "an F, I or B");
  }

  const Config& config_;
  InjectedFault fault_;
};

bool is_due(const InjectedFault& f, const FaultPlan::Point& point) {
  if (f.step && *f.step != point.step) return false;
  if (point.action != nullptr) return f.action == *point.action && (f.kind == FaultKind::kNan) == point.done;
  return !point.operation.empty() && f.operation == point.operation && (f.file.empty() || f.file == point.file);
}

}  // namespace

void check_injected_faults(const Config& config, Faults& faults) {
  for (const std::string& text : config.runtime.faults) {
    try {
      (void)Reader(text, config).read();
    } catch (const ConfigError& e) {
      faults.add("runtime.faults", e.what());
    }
  }
}

void expect_faults_allowed(const Config& config, bool allowed) {
  if (config.runtime.faults.empty()) return;
  if (!allowed) {
    throw ConfigError(
        "runtime.faults breaks a run on purpose; remove it, or say train --enable-fault-injection if that is meant.");
  }
  std::set<Action> known;
  for (const auto& list : make_rank_plan(config).schedule.actions) known.insert(list.begin(), list.end());
  for (const std::string& text : config.runtime.faults) {
    const InjectedFault f = Reader(text, config).read();
    if (!f.action || known.contains(*f.action)) continue;
    throw ConfigError("runtime.faults: \"" + text +
                      "\" is at an action that no rank runs; qeffect plan --csv lowered " + "prints what they run.");
  }
}

FaultPlan::FaultPlan(const Config& config, int world_rank) {
  for (const std::string& text : config.runtime.faults) {
    InjectedFault f = Reader(text, config).read();
    if (!f.rank || *f.rank == world_rank) faults_.push_back(std::move(f));
  }
}

std::optional<InjectedFault> FaultPlan::take(const Point& point) {
  const std::lock_guard lock(mutex_);
  const auto due = std::find_if(faults_.begin(), faults_.end(), [&](const auto& f) { return is_due(f, point); });
  if (due == faults_.end()) return std::nullopt;
  InjectedFault taken = std::move(*due);
  faults_.erase(due);
  return taken;
}

bool FaultPlan::takes_alias(StageIndex stage, int matrix, MicrobatchIndex microbatch) {
  const std::lock_guard lock(mutex_);
  return std::any_of(faults_.begin(), faults_.end(), [&](const InjectedFault& f) {
    return f.kind == FaultKind::kAlias && f.stage == to_int(stage) && f.matrix == matrix &&
           f.microbatch == to_int(microbatch);
  });
}

}  // namespace qe
