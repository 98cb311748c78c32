// A group of the core as torch's backend, without its operations: how it is set up, divided and
// closed, and how a Call is run in the calling thread, handed to the group's worker, coalesced with
// others or shown to a profiler.
#pragma once

#include <atomic>
#include <deque>
#include <functional>

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include "work.h"

namespace tutti {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Set in debug mode only: says where in the caller's code the current call is.
inline std::atomic<std::function<std::string()>*> where_hook{nullptr};
// Makes the backend of a part of a group, for ProcessGroup::splitGroup.
using Maker = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>&, int rank, int size, std::chrono::milliseconds,
    const std::string& name)>;
inline Maker maker;

inline c10::intrusive_ptr<c10d::Backend> make_part(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options, int rank) {
    auto place = std::find(ranks.begin(), ranks.end(), rank);
    if (place == ranks.end()) return nullptr;
    return maker(store, static_cast<int>(place - ranks.begin()), static_cast<int>(ranks.size()),
                 options->timeout, options->group_name);
}

constexpr uint64_t kLentBytes = 32 << 10;  // below, staging is as fast

class ShmGroup : public c10d::Backend {
   public:
    ShmGroup(tutti_group* group, int rank, int size, std::chrono::milliseconds timeout,
             std::string name, std::vector<int64_t> global_ranks)
        : Backend(rank, size),
          group_(group),
          timeout_(timeout),
          name_(std::move(name)),
          global_ranks_(std::move(global_ranks)),
          pending_(std::make_shared<Pending>()),
          finished_(c10::make_intrusive<Finished>()) {}

    ~ShmGroup() override { close(false); }

    tutti_group* group() const { return group_; }
    const std::string getBackendName() const override { return "shm"; }
    bool supportsCoalescing() const override { return true; }
    bool supportsSplitting() const override { return maker != nullptr; }
    void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return sequence_; }
    c10d::ErrorType getError() override {
        int code = pending_->first_failure();
        if (code == TUTTI_OK) return c10d::ErrorType::SUCCESS;
        return code == TUTTI_TIMEOUT ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR;
    }

    c10::intrusive_ptr<Options> getBackendOptions() override {
        auto options = c10::make_intrusive<Options>("shm", timeout_);
        options->group_name = name_;
        options->global_ranks_in_group.assign(global_ranks_.begin(), global_ranks_.end());
        return options;
    }

    c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                            const std::vector<int>& ranks,
                                            const c10::intrusive_ptr<Options>& options) override {
        return make_part(store, ranks, options, rank_);
    }

    void abort() override {
        if (group_) core.group_abort(group_);
    }

    // DDP asks for its buckets here, when DDP_DISABLE_COMM_MEM=0. The CPU has no index.
    bool supportsTensorAlloc(c10::DeviceIndex index) override {
        return index < 0 && size_ > 1;
    }
    at::Tensor allocateTensor(long size, at::TensorOptions options) override {
        uint64_t bytes = static_cast<uint64_t>(size) * options.dtype().itemsize();
        void* memory = bytes >= kLentBytes ? core.lend(bytes) : nullptr;
        if (!memory) return at::empty({size}, options);  // works as well, but is copied
        return at::from_blob(memory, {size}, [](void* lent) { core.take_back(lent); },
                             at::TensorOptions(options.dtype()));
    }

    // Lets what is under way end first, as gloo does.
    void shutdown() override { close(true); }

    void startCoalescing() override {
        coalescing_ = true;
        coalesced_.clear();
    }

    WorkPtr endCoalescing() override {
        coalescing_ = false;
        auto left = std::exchange(coalesced_, {});
        return together({left.begin(), left.end()});
    }

   protected:
    void close(bool let_end) {
        tutti_group* group = std::exchange(group_, nullptr);
        if (!group) return;
        if (let_end) pending_->wait_for_none();
        core.group_close(group);
    }

    // Runs a call in the calling thread, or hands it to the group's worker.
    WorkPtr issue(Call&& call, bool async, std::chrono::milliseconds timeout) {
        if (C10_UNLIKELY(!group_))
            throw Failure(TUTTI_CLOSED, c10::str("shm ", call.kind->name, ": group ", name_,
                                                 " is closed: it was destroyed on this rank"));
        if (auto* hook = where_hook.load(std::memory_order_acquire); C10_UNLIKELY(hook != nullptr))
            call.where = (*hook)();
        uint64_t sequence = ++sequence_;
        auto given = timeout == c10d::kUnsetTimeout ? timeout_ : timeout;
        double timeout_s = given.count() / 1000.0;
        bool queued = async || coalescing_;
        if (C10_LIKELY(!at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)))
            return queued ? submit(std::move(call), sequence, timeout_s, nullptr)
                          : run(call, timeout_s);
        return profiled(std::move(call), sequence, timeout_s, queued);
    }

    // `count` operations as one: `one(i)` issues each of them.
    template <class One>
    WorkPtr each(size_t count, bool async, One one) {
        std::vector<WorkPtr> works;
        for (size_t i = 0; i < count; ++i) works.push_back(one(i));
        if (!async && !coalescing_) return finished_;
        return together(std::move(works));
    }

   private:
    tutti_group* group_;
    std::chrono::milliseconds timeout_;
    const std::string name_;
    const std::vector<int64_t> global_ranks_;
    std::shared_ptr<Pending> pending_;
    c10::intrusive_ptr<Finished> finished_;
    std::atomic<uint64_t> sequence_{0};
    bool coalescing_ = false;
    std::deque<WorkPtr> coalesced_;  // what is under way or failed; the rest need not be waited for

    WorkPtr run(Call& call, double timeout_s) {
        tutti_operation operation = call.operation();
        int code = core.run(group_, &operation, timeout_s);
        if (C10_UNLIKELY(code != TUTTI_OK)) {
            pending_->failed(code);
            throw Failure(code, core.error());
        }
        call.copy_back();
        return finished_;
    }

    WorkPtr submit(Call&& call, uint64_t sequence, double timeout_s, const char* title) {
        auto work =
            c10::make_intrusive<ShmWork>(rank_, sequence, std::move(call), title, pending_);
        work->begin(group_, timeout_s);
        if (coalescing_) {
            // A block that was left by an exception is never ended: do not keep tensors for it.
            while (!coalesced_.empty() && coalesced_.front()->isCompleted() &&
                   coalesced_.front()->isSuccess())
                coalesced_.pop_front();
            coalesced_.push_back(work);
        }
        return work;
    }

    // The same, under the names and with the metadata that traces of NCCL have.
    WorkPtr profiled(Call&& call, uint64_t sequence, double timeout_s, bool queued) {
        bool message = call.kind->code == TUTTI_SEND || call.kind->code == TUTTI_RECV;
        int64_t start = global_ranks_.empty() ? 0 : global_ranks_.front();
        int64_t stride = 1;
        if (global_ranks_.size() > 1)
            stride = (global_ranks_.back() - start) / (static_cast<int64_t>(size_) - 1);
        RECORD_PARAM_COMMS_DATA(
            std::make_tuple(static_cast<int64_t>(sequence), message),
            std::make_tuple(pg_uid_.empty() ? name_ : pg_uid_, pg_desc_),
            std::vector<at::Tensor>(call.inputs.begin(), call.inputs.end()), call.results(),
            message ? call.peer : call.root, std::string(call.kind->name),
            Call::elements(call.inputs), Call::elements(call.outputs), call.scalar,
            std::vector<int64_t>(), std::vector<int64_t>(), static_cast<int>(start),
            static_cast<int>(stride), size_);
        const char* title = call.kind->title;
        if (queued) return submit(std::move(call), sequence, timeout_s, title);
        return run_titled(call, timeout_s);
    }

    WorkPtr run_titled(Call& call, double timeout_s) {
        RECORD_FUNCTION(call.kind->title,
                        std::vector<c10::IValue>(call.inputs.begin(), call.inputs.end()));
        return run(call, timeout_s);
    }

    WorkPtr together(std::vector<WorkPtr> works) {
        auto all = c10::make_intrusive<Together>(rank_, std::move(works));
        all->begin();
        return all;
    }
};

}  // namespace tutti
