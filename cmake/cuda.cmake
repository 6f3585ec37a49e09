# Decides whether the CUDA backend is built and how device code is compiled. Sets QE_BUILD_CUDA.
#   QE_CUDA=AUTO  when nvcc is in PATH (or CMAKE_CUDA_COMPILER, CUDACXX) and cuBLASLt is there, and no sanitizer is on
#   QE_CUDA=ON    always; configuring fails where the toolkit is not
#   QE_CUDA=OFF   never
set(QE_CUDA AUTO CACHE STRING "CUDA backend: AUTO, ON or OFF")
set_property(CACHE QE_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT QE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "QE_CUDA is '${QE_CUDA}'; use AUTO, ON or OFF")
endif()

set(QE_BUILD_CUDA OFF)
if(QE_CUDA STREQUAL "ON" OR (QE_CUDA STREQUAL "AUTO" AND NOT QE_SANITIZE))
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit 13.0 QUIET)
  endif()
  if(CMAKE_CUDA_COMPILER AND TARGET CUDA::cublasLt)
    set(QE_BUILD_CUDA ON)
  elseif(QE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "QE_CUDA is ON, but the CUDA toolkit (13.0 or newer, with cuBLASLt) was not found; put its bin "
                        "folder into PATH or set CMAKE_CUDA_COMPILER")
  endif()
endif()
message(STATUS "CUDA backend: ${QE_BUILD_CUDA} (QE_CUDA=${QE_CUDA})")

if(QE_BUILD_CUDA)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a CACHE STRING "Cards to compile for; 90a is Hopper")
  endif()
  if(NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER AND CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
  endif()
  enable_language(CUDA)
  # CMake 3.25 does not know that nvcc 13 compiles C++20.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
endif()
