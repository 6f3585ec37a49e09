// Makes the backend that a config names. The only room that knows which backends were built.
#pragma once

#include <memory>
#include <string>

#include "core/device.h"
#include "core/ops.h"

namespace qe {

struct Backend {
  std::unique_ptr<Device> device;
  std::unique_ptr<Ops> ops;  // destroyed before its device
};

// "cpu", "cuda" or "auto". Throws ConfigError when the backend was not built in, DeviceError when it has no device.
Backend make_backend(const std::string& name);

}  // namespace qe
