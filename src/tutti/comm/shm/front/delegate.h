// A group written in Python as a c10d backend, so that it can stand beside NCCL in one process
// group ("cpu:shm,cuda:nccl" over several hosts) instead of in place of the whole.
#pragma once

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"

namespace tutti {

namespace py = pybind11;

// A Python object that may be let go of by any thread.
class Held {
   public:
    explicit Held(py::object object) : object_(object.release().ptr()) {}
    Held(const Held&) = delete;
    ~Held() {
        if (!Py_IsInitialized()) return;
        py::gil_scoped_acquire gil;
        Py_DECREF(object_);
    }
    py::object get() const { return py::reinterpret_borrow<py::object>(object_); }

   private:
    PyObject* object_;
};

// What a Python group returned; it lives as long as C++ holds this.
class HeldWork : public c10d::Work {
   public:
    explicit HeldWork(py::object work) : work_(std::move(work)) {}

    bool wait(std::chrono::milliseconds timeout) override {
        py::gil_scoped_acquire gil;
        return work_.get().attr("wait")(timeout).cast<bool>();
    }
    bool isCompleted() override {
        py::gil_scoped_acquire gil;
        return work_.get().attr("is_completed")().cast<bool>();
    }
    bool isSuccess() const override {
        py::gil_scoped_acquire gil;
        return work_.get().attr("is_success")().cast<bool>();
    }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        py::gil_scoped_acquire gil;
        auto future = work_.get().attr("get_future")();
        return future.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut;
    }
    std::vector<at::Tensor> result() override {
        py::gil_scoped_acquire gil;
        return work_.get().attr("result")().cast<std::vector<at::Tensor>>();
    }

   private:
    Held work_;
};

class PythonBackend : public c10d::Backend {
   public:
    PythonBackend(py::object group, int rank, int size)
        : Backend(rank, size), group_(std::move(group)) {}

    py::object group() const { return group_.get(); }
    const std::string getBackendName() const override { return "shm"; }
    bool supportsSplitting() const override { return maker != nullptr; }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return 0; }
    void setTimeout(std::chrono::milliseconds timeout) override { tell("set_timeout", timeout); }
    void abort() override { tell("abort"); }
    void shutdown() override { tell("shutdown"); }

    c10::intrusive_ptr<Options> getBackendOptions() override {
        py::gil_scoped_acquire gil;
        auto timeout = group().attr("timeout").cast<std::chrono::milliseconds>();
        return c10::make_intrusive<Options>("shm", timeout);
    }
    c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                            const std::vector<int>& ranks,
                                            const c10::intrusive_ptr<Options>& options) override {
        return make_part(store, ranks, options, rank_);
    }

    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
        return ask("allreduce", tensors, opts);
    }
    WorkPtr allreduce_coalesced(Tensors& tensors,
                                const c10d::AllreduceCoalescedOptions& opts) override {
        return ask("allreduce_coalesced", tensors, opts);
    }
    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
        return ask("broadcast", tensors, opts);
    }
    WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
        return ask("reduce", tensors, opts);
    }
    WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                      const c10d::AllgatherOptions& opts) override {
        return ask("allgather", outputs, inputs, opts);
    }
    WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                            const c10d::AllgatherOptions& opts) override {
        return ask("_allgather_base", output, input, opts);
    }
    WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) override {
        return ask("allgather_coalesced", outputs, inputs, opts);
    }
    WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) override {
        return ask("allgather_into_tensor_coalesced", outputs, inputs, opts);
    }
    WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                           const c10d::ReduceScatterOptions& opts) override {
        return ask("reduce_scatter", outputs, inputs, opts);
    }
    WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::ReduceScatterOptions& opts) override {
        return ask("_reduce_scatter_base", output, input, opts);
    }
    WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::ReduceScatterOptions& opts) override {
        return ask("reduce_scatter_tensor_coalesced", outputs, inputs, opts);
    }
    WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
        return ask("gather", outputs, inputs, opts);
    }
    WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                    const c10d::ScatterOptions& opts) override {
        return ask("scatter", outputs, inputs, opts);
    }
    WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
        return ask("alltoall", outputs, inputs, opts);
    }
    WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows,
                          std::vector<int64_t>& input_rows,
                          const c10d::AllToAllOptions& opts) override {
        return ask("alltoall_base", output, input, output_rows, input_rows, opts);
    }
    WorkPtr send(Tensors& tensors, int to, int tag) override {
        return ask("send", tensors, to, tag);
    }
    WorkPtr recv(Tensors& tensors, int from, int tag) override {
        return ask("recv", tensors, from, tag);
    }
    WorkPtr recvAnysource(Tensors& tensors, int tag) override {
        return ask("recv_anysource", tensors, tag);
    }
    WorkPtr barrier(const c10d::BarrierOptions& opts) override { return ask("barrier", opts); }

   private:
    Held group_;

    template <class... Arguments>
    WorkPtr ask(const char* name, const Arguments&... arguments) {
        py::gil_scoped_acquire gil;
        return c10::make_intrusive<HeldWork>(group().attr(name)(arguments...));
    }

    template <class... Arguments>
    void tell(const char* name, const Arguments&... arguments) {
        py::gil_scoped_acquire gil;
        group().attr(name)(arguments...);
    }
};

}  // namespace tutti
