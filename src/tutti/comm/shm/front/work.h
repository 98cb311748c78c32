// The c10d::Work objects that operations return. A Work keeps its tensors alive until the operation
// has ended, even if the caller drops the Work.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>

#include <unistd.h>

#include <ATen/core/ivalue.h>

#include "operation.h"

namespace tutti {

// Counts the unfinished operations of a group. Closing the group waits until the count is 0.
class Pending {
   public:
    void failed(int code) {
        int none = TUTTI_OK;
        first_failure_.compare_exchange_strong(none, code);
    }
    int first_failure() const { return first_failure_; }
    void add() {
        std::lock_guard<std::mutex> hold(mutex_);
        ++count_;
        process_ = getpid();
    }
    void remove() {
        std::lock_guard<std::mutex> hold(mutex_);
        if (--count_ == 0) none_.notify_all();
    }
    void wait_for_none() {
        if (process_ != getpid()) return;  // a forked child has no thread to finish operations
        std::unique_lock<std::mutex> hold(mutex_);
        none_.wait(hold, [&] { return count_ == 0; });
    }

   private:
    std::mutex mutex_;
    std::condition_variable none_;
    int64_t count_ = 0;
    pid_t process_ = 0;
    std::atomic<int> first_failure_{TUTTI_OK};
};

// A Work that creates its future on demand, because most callers do not use the future.
class FutureWork : public c10d::Work {
   public:
    using c10d::Work::Work;

    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        std::unique_lock<std::mutex> hold(future_mutex_);
        if (!future_) {
            future_ = c10::make_intrusive<c10::ivalue::Future>(
                c10::ListType::create(c10::TensorType::get()));
            if (over_) {
                hold.unlock();
                complete(future_);
            }
        }
        return future_;
    }

    uint64_t getSequencenumber() const override { return sequence_; }

   protected:
    uint64_t sequence_ = 0;

    // Returns the tensors that the profiler records, or nullopt if the span has no title.
    static std::optional<std::vector<at::Tensor>> inputs_of(const Call& call, const char* title) {
        if (!title) return std::nullopt;
        return std::vector<at::Tensor>(call.inputs.begin(), call.inputs.end());
    }

    // Marks the Work as completed, then completes its future. The callbacks of the future may run
    // in this thread.
    void settle(std::exception_ptr error) {
        if (auto future = mark_completed(error)) complete(future);
    }

    // The first half of settle(). Returns the future that is still to be completed, or nullptr.
    c10::intrusive_ptr<c10::ivalue::Future> mark_completed(std::exception_ptr error) {
        error_ = error;
        finish(error);
        std::lock_guard<std::mutex> hold(future_mutex_);
        over_ = true;
        return future_;
    }

    void complete(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
        if (error_)
            future->setError(error_);
        else
            future->markCompleted(c10::IValue(result()));
    }

   private:
    std::mutex future_mutex_;
    bool over_ = false;
    std::exception_ptr error_;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// An operation that the core runs.
class ShmWork : public FutureWork {
   public:
    ShmWork(int rank, uint64_t sequence, Call&& call, const char* title,
            std::shared_ptr<Pending> pending)
        : FutureWork(rank, call.kind->type, title, inputs_of(call, title)),
          call_(std::move(call)),
          pending_(std::move(pending)) {
        sequence_ = sequence;
    }

    ~ShmWork() override {
        if (handle_) core.work_free(handle_);
    }

    void begin(tutti_group* group, double timeout_s) {
        tutti_operation operation = call_.operation();
        // Closing the group does not wait for a recv, because its message may never arrive.
        counts_ = operation.kind != TUTTI_RECV;
        if (counts_) pending_->add();
        // The core owns one reference, which `done` releases.
        auto self = c10::intrusive_ptr<ShmWork>::unsafe_reclaim_from_nonowning(this);
        ShmWork* argument = self.release();
        handle_ = core.submit(group, &operation, timeout_s, &ShmWork::done, argument);
        if (!handle_) {
            Failure failure(core.error_code(), core.error());
            if (counts_) pending_->remove();
            c10::intrusive_ptr<ShmWork>::reclaim(argument);
            throw failure;
        }
    }

    bool wait(std::chrono::milliseconds timeout) override {
        if (!isCompleted()) {
            double seconds = timeout == kNoTimeout ? -1.0 : timeout.count() / 1000.0;
            int code = core.work_wait(handle_, seconds);
            if (code != TUTTI_OK && !core.work_is_done(handle_)) throw Failure(code, core.error());
        }
        std::unique_lock<std::mutex> hold(mutex_);
        cv_.wait(hold, [&] { return completed_; });  // `done` may still be copying results back
        if (exception_) std::rethrow_exception(exception_);
        return true;
    }

    std::vector<at::Tensor> result() override { return call_.results(); }

    int sourceRank() const override { return core.work_source(handle_); }

   private:
    Call call_;
    std::shared_ptr<Pending> pending_;
    tutti_work* handle_ = nullptr;
    bool counts_ = true;

    static void done(void* argument, int code, const char* text) {
        auto self = c10::intrusive_ptr<ShmWork>::reclaim(static_cast<ShmWork*>(argument));
        std::exception_ptr error;
        if (code != TUTTI_OK) {
            self->pending_->failed(code);
            error = std::make_exception_ptr(Failure(code, text ? text : ""));
        } else {
            try {
                self->call_.copy_back();
            } catch (...) {
                error = std::current_exception();
            }
        }
        std::shared_ptr<Pending> pending = self->counts_ ? self->pending_ : nullptr;
        self->settle(error);
        self.reset();
        if (pending) pending->remove();
    }
};

// One Work for several operations. It is completed when all operations are completed. Messages may
// end in any order, so wait() waits for all parts.
class CoalescedWork : public FutureWork {
   public:
    CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts)
        : FutureWork(rank, c10d::OpType::COALESCED), parts_(std::move(parts)) {}

    void begin() {
        left_ = parts_.size();
        if (parts_.empty()) return settle(nullptr);
        for (auto& part : parts_) {
            // The callback keeps this object alive. The part's future deletes the callback after it
            // has run.
            auto self = c10::intrusive_ptr<CoalescedWork>::unsafe_reclaim_from_nonowning(this);
            part->getFuture()->addCallback([self](c10::ivalue::Future& future) {
                self->part_ended(future.hasError() ? future.exception_ptr() : nullptr);
            });
        }
    }

    bool wait(std::chrono::milliseconds timeout) override {
        auto begun = std::chrono::steady_clock::now();
        for (auto& part : parts_) part->wait(rest_of(timeout, begun));
        std::unique_lock<std::mutex> hold(mutex_);
        cv_.wait(hold, [&] { return completed_; });
        if (exception_) std::rethrow_exception(exception_);
        return true;
    }

    std::vector<at::Tensor> result() override {
        std::vector<at::Tensor> all;
        for (auto& part : parts_)
            for (auto& tensor : part->result()) all.push_back(tensor);
        return all;
    }

   private:
    std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
    std::mutex count_mutex_;
    size_t left_ = 0;
    std::exception_ptr first_error_;

    // All parts share one timeout. The remaining time is never 0, because 0 would mean no timeout.
    static std::chrono::milliseconds rest_of(std::chrono::milliseconds limit,
                                             std::chrono::steady_clock::time_point begun) {
        using std::chrono::milliseconds;
        if (limit <= kNoTimeout) return limit;
        auto passed = std::chrono::steady_clock::now() - begun;
        return std::max(limit - std::chrono::duration_cast<milliseconds>(passed), milliseconds(1));
    }

    void part_ended(std::exception_ptr error) {
        bool last;
        {
            std::lock_guard<std::mutex> hold(count_mutex_);
            if (error && !first_error_) first_error_ = error;
            last = --left_ == 0;
        }
        if (last) settle(first_error_);
    }
};

// The result of a synchronous operation. All operations without results share one object.
class CompletedWork : public FutureWork {
   public:
    explicit CompletedWork(std::vector<at::Tensor> results = {}) : results_(std::move(results)) {
        settle(nullptr);
    }
    bool isCompleted() override { return true; }
    bool isSuccess() const override { return true; }
    bool wait(std::chrono::milliseconds) override { return true; }
    std::vector<at::Tensor> result() override { return results_; }

   private:
    std::vector<at::Tensor> results_;
};

}  // namespace tutti
