// The Python module tutti.comm.shm._front: the shm backend compiled against the installed torch.
#include "delegate.h"

#include <ATen/ThreadLocalState.h>
#include <optional>

namespace py = pybind11;

// Read from the file before it is loaded: another torch has other classes at these addresses.
extern "C" __attribute__((used)) const char tutti_front_built_for[] =
    "tutti-front-built-for-torch:" TUTTI_TORCH_VERSION ";";

namespace tutti {

// Failures become the exceptions that the plain front raises (native.error_for(code, text)).
static PyObject* exception_for = nullptr;

static void translate(std::exception_ptr pointer) {
    try {
        if (pointer) std::rethrow_exception(pointer);
    } catch (const Failure& failure) {
        py::object made = py::reinterpret_borrow<py::object>(exception_for)(
            failure.code, failure.what_without_backtrace());
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
    }
}

// Closing joins threads that may be waiting for the GIL to run a Python callback.
class GilFreeBackend : public ShmBackend {
   public:
    using ShmBackend::ShmBackend;
    ~GilFreeBackend() override {
        if (!Py_IsInitialized() || !PyGILState_Check()) return;
        py::gil_scoped_release release;
        close(false);
    }
};

// What a thread's profiler goes by, taken over by another one between `enter` and `exit`.
class ThreadState {
   public:
    void enter() { guard_.emplace(state_); }
    void exit() { guard_.reset(); }

   private:
    at::ThreadLocalState state_;
    std::optional<at::ThreadLocalStateGuard> guard_;
};

// What traces know of a collective besides its time, for one that Python runs.
static void show(int64_t sequence, const std::string& group, const std::string& description,
                 const std::string& collective, const std::vector<at::Tensor>& inputs,
                 const std::vector<at::Tensor>& outputs, int root, int size) {
    auto scalar = inputs.empty() ? at::kByte : inputs[0].scalar_type();
    auto elements = [](const std::vector<at::Tensor>& tensors) {
        int64_t sum = 0;
        for (const auto& tensor : tensors) sum += tensor.numel();
        return sum;
    };
    RECORD_PARAM_COMMS_DATA(std::make_tuple(sequence, false), std::make_tuple(group, description),
                            inputs, outputs, root, std::string(collective), elements(inputs),
                            elements(outputs), scalar, std::vector<int64_t>(),
                            std::vector<int64_t>(), 0, 1, size);
}

static void set_where(py::object function) {
    auto* old = where_hook.exchange(nullptr);
    if (!function.is_none()) {
        // Never freed, like `old`: a call on another thread may be inside it.
        auto* kept = new py::object(std::move(function));
        where_hook = new std::function<std::string()>([kept] {
            py::gil_scoped_acquire gil;
            return (*kept)().cast<std::string>();
        });
    }
    (void)old;
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
    using tutti::GilFreeBackend;
    py::module_::import("torch.distributed");
    module.doc() = "The shm backend for the torch it was built with.";
    module.def("load_core", &tutti::load_core, "Take the core's functions from this file.");
    module.def("set_where", &tutti::set_where, "A function that says where the caller is, or None.");
    module.def("set_maker", &tutti::set_maker, "What makes the backend of a part of a group.");
    module.def("set_exceptions", [](py::object function) {
        tutti::exception_for = function.release().ptr();
        py::register_exception_translator(&tutti::translate);
    });
    py::class_<GilFreeBackend, c10d::Backend, c10::intrusive_ptr<GilFreeBackend>>(module,
                                                                                  "ShmBackend")
        .def(py::init([](int64_t group, int rank, int size, std::chrono::milliseconds timeout,
                         const std::string& name, std::vector<int64_t> global_ranks) {
                 return c10::make_intrusive<GilFreeBackend>(reinterpret_cast<tutti_group*>(group),
                                                            rank, size, timeout, name,
                                                            std::move(global_ranks));
             }),
             py::arg("group"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
             py::arg("name"), py::arg("global_ranks"))
        .def_property_readonly(
            "native_group",
            [](const GilFreeBackend& self) { return reinterpret_cast<int64_t>(self.group()); },
            "The address of the core's group; 0 once closed.");
    module.def("show", &tutti::show, "Tell a profiler in this thread of a collective.");
    py::class_<tutti::ThreadState>(module, "ThreadState")
        .def(py::init<>())
        .def("__enter__", &tutti::ThreadState::enter)
        .def("__exit__", [](tutti::ThreadState& self, const py::args&) { self.exit(); });
    using tutti::PythonBackend;
    py::class_<PythonBackend, c10d::Backend, c10::intrusive_ptr<PythonBackend>>(module,
                                                                                "PythonBackend")
        .def(py::init([](py::object group, int rank, int size) {
                 return c10::make_intrusive<PythonBackend>(std::move(group), rank, size);
             }),
             py::arg("group"), py::arg("rank"), py::arg("size"))
        .def_property_readonly("hosts", [](const PythonBackend& self) {
            return self.group().attr("hosts");
        });
}
