// The core's functions, found at run time in the very file that Python has loaded by ctypes, so
// that both see the same groups and the compiled front can be rebuilt without the core.
#pragma once

#include <dlfcn.h>

#include <string>

#include <c10/util/Exception.h>

extern "C" {
#include "../core/tutti_shm.h"
}

namespace tutti {

struct Core {
    decltype(&tutti_error) error;
    decltype(&tutti_error_code) error_code;
    decltype(&tutti_group_abort) group_abort;
    decltype(&tutti_group_close) group_close;
    decltype(&tutti_lend) lend;
    decltype(&tutti_take_back) take_back;
    decltype(&tutti_run) run;
    decltype(&tutti_submit) submit;
    decltype(&tutti_work_is_done) work_is_done;
    decltype(&tutti_work_wait) work_wait;
    decltype(&tutti_work_source) work_source;
    decltype(&tutti_work_free) work_free;
};

inline Core core;

inline void load_core(const std::string& path) {
    void* file = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(file, "the shared-memory core cannot be loaded: ", dlerror());
    auto find = [&](auto& function, const char* name) {
        function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(file, name));
        TORCH_CHECK(function, path, " has no ", name, ": rebuild it (pip install -e .)");
    };
    decltype(&tutti_abi) abi;
    find(abi, "tutti_abi");
    TORCH_CHECK(abi() == TUTTI_ABI, path, " has ABI ", abi(), ", the compiled front was built for ",
                TUTTI_ABI, ": rebuild both (pip install --no-build-isolation -e .)");
    find(core.error, "tutti_error");
    find(core.error_code, "tutti_error_code");
    find(core.group_abort, "tutti_group_abort");
    find(core.group_close, "tutti_group_close");
    find(core.lend, "tutti_lend");
    find(core.take_back, "tutti_take_back");
    find(core.run, "tutti_run");
    find(core.submit, "tutti_submit");
    find(core.work_is_done, "tutti_work_is_done");
    find(core.work_wait, "tutti_work_wait");
    find(core.work_source, "tutti_work_source");
    find(core.work_free, "tutti_work_free");
}

// A failed operation. Python sees the same exceptions as from the plain front (module.cpp).
class Failure : public c10::DistBackendError {
   public:
    Failure(int code, std::string text)
        : DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::move(text)),
          code(code) {}
    const int code;
};

}  // namespace tutti
