// The backend of a group whose ranks are all on one host. The core runs every operation.
#pragma once

#include "backend.h"

namespace tutti {

constexpr uint64_t kExportBytes = 32 << 10;  // for smaller DDP buckets, staging is as fast

class ShmBackend : public BackendBase {
   public:
    ShmBackend(tutti_group* group, int rank, int size, std::chrono::milliseconds timeout,
               std::string name, std::vector<int64_t> global_ranks)
        : BackendBase(rank, size, timeout, std::move(name), std::move(global_ranks)),
          group_(group) {}

    ~ShmBackend() override { close(false); }

    tutti_group* group() const { return group_; }

    void abort() override {
        if (group_) core.group_abort(group_);
    }

    void shutdown() override { close(true); }

    // DDP uses these two methods to allocate its buckets if DDP_DISABLE_COMM_MEM=0. A CPU device
    // has no index.
    bool supportsTensorAlloc(c10::DeviceIndex index) override { return index < 0 && size_ > 1; }

    at::Tensor allocateTensor(long size, at::TensorOptions options) override {
        uint64_t bytes = static_cast<uint64_t>(size) * options.dtype().itemsize();
        void* memory = bytes >= kExportBytes ? core.export_alloc(bytes) : nullptr;
        if (!memory) return at::empty({size}, options);  // collectives then use staging copies
        return at::from_blob(memory, {size}, [](void* exported) { core.export_free(exported); },
                             at::TensorOptions(options.dtype()));
    }

   protected:
    // If `wait_for_pending` is true, first waits for unfinished operations, as gloo does.
    void close(bool wait_for_pending) {
        tutti_group* group = std::exchange(group_, nullptr);
        if (!group) return;
        if (wait_for_pending) pending_->wait_for_none();
        core.group_close(group);
    }

    bool closed() const override { return !group_; }

    void run(Call& call, uint64_t, double timeout_s) override {
        tutti_operation operation = call.operation();
        int code = core.run(group_, &operation, timeout_s);
        if (C10_UNLIKELY(code != TUTTI_OK)) {
            pending_->failed(code);
            throw Failure(code, core.error());
        }
        call.copy_back();
    }

    WorkPtr submit(Call&& call, uint64_t sequence, double timeout_s, const char* title) override {
        auto work =
            c10::make_intrusive<ShmWork>(rank_, sequence, std::move(call), title, pending_);
        work->begin(group_, timeout_s);
        return work;
    }

   private:
    tutti_group* group_;
};

}  // namespace tutti
