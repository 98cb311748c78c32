// The Python module tutti.comm.shm._front: the shm backend, compiled for the installed torch.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "hierarchy.h"
#include "single_host.h"

namespace py = pybind11;

// The loader (jit_build.py) reads this mark from the file before it loads the file, because torch's
// classes may have a different layout in another version of torch.
#ifndef TUTTI_SOURCE_HASH
#define TUTTI_SOURCE_HASH "unknown"
#endif
extern "C" __attribute__((used)) const char tutti_front_built_from[] =
    "tutti-built-from:" TUTTI_SOURCE_HASH ";";

namespace tutti {

static PyObject* exception_for = nullptr;  // native.error_for(code, text)

static void translate(std::exception_ptr pointer) {
    try {
        if (pointer) std::rethrow_exception(pointer);
    } catch (const Failure& failure) {
        py::object made = py::reinterpret_borrow<py::object>(exception_for)(
            failure.code, failure.what_without_backtrace());
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
    }
}

// Closes its group without the GIL, because closing joins threads that may be waiting for the GIL
// to run a Python callback.
template <class Base>
class WithoutGil : public Base {
   public:
    using Base::Base;
    ~WithoutGil() override {
        if (!Py_IsInitialized() || !PyGILState_Check()) return;
        py::gil_scoped_release release;
        this->close(false);
    }
};

static void set_where(py::object function) {
    // The old function is never freed, because another thread may still be calling it.
    where_hook.exchange(nullptr);
    if (function.is_none()) return;
    auto* kept = new py::object(std::move(function));
    where_hook = new std::function<std::string()>([kept] {
        py::gil_scoped_acquire gil;
        return (*kept)().cast<std::string>();
    });
}

static void set_maker(py::object function) {
    auto* kept = new py::object(std::move(function));
    maker = [kept](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                   std::chrono::milliseconds timeout, const std::string& name) {
        py::gil_scoped_acquire gil;
        return (*kept)(store, rank, size, timeout, name)
            .cast<c10::intrusive_ptr<c10d::Backend>>();
    };
}

}  // namespace tutti

PYBIND11_MODULE(_front, module) {
    using SingleHost = tutti::WithoutGil<tutti::ShmBackend>;
    using Hierarchical = tutti::WithoutGil<tutti::HierarchicalBackend>;
    using Milliseconds = std::chrono::milliseconds;
    py::module_::import("torch.distributed");
    module.doc() = "The shm backend, compiled for one version of torch.";
    module.def("load_core", &tutti::load_core, "Look up the core's functions in a library file.");
    module.def("set_where", &tutti::set_where,
               "Set the function that returns the caller's source location. None removes it.");
    module.def("set_maker", &tutti::set_maker, "Set the function that creates a subgroup's backend.");
    module.def("set_exceptions", [](py::object function) {
        tutti::exception_for = function.release().ptr();
        py::register_exception_translator(&tutti::translate);
    });
    py::class_<SingleHost, c10d::Backend, c10::intrusive_ptr<SingleHost>>(module, "ShmBackend")
        .def(py::init([](int64_t group, int rank, int size, Milliseconds timeout,
                         const std::string& name, std::vector<int64_t> global_ranks) {
                 return c10::make_intrusive<SingleHost>(reinterpret_cast<tutti_group*>(group), rank,
                                                        size, timeout, name, std::move(global_ranks));
             }),
             py::arg("group"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
             py::arg("name"), py::arg("global_ranks"))
        .def_property_readonly(
            "native_group",
            [](const SingleHost& self) { return reinterpret_cast<int64_t>(self.group()); },
            "The address of the core's group, or 0 after the group was closed.")
        .def_property_readonly("options", &SingleHost::getBackendOptions);
    py::class_<Hierarchical, c10d::Backend, c10::intrusive_ptr<Hierarchical>>(module,
                                                                              "HierarchicalBackend")
        .def(py::init([](int64_t group, std::vector<std::vector<int>> hosts,
                         c10::intrusive_ptr<c10d::Backend> all,
                         c10::intrusive_ptr<c10d::Backend> leaders, int rank, int size,
                         Milliseconds timeout, const std::string& name,
                         std::vector<int64_t> global_ranks) {
                 return c10::make_intrusive<Hierarchical>(
                     reinterpret_cast<tutti_group*>(group), std::move(hosts), std::move(all),
                     std::move(leaders), rank, size, timeout, name, std::move(global_ranks));
             }),
             py::arg("group"), py::arg("hosts"), py::arg("all"), py::arg("leaders").none(true),
             py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("name"),
             py::arg("global_ranks"))
        .def_property_readonly("hosts", &Hierarchical::hosts)
        .def_property_readonly("options", &Hierarchical::getBackendOptions);
}
