// The backend of a group over several hosts: shared memory inside each host, gloo between hosts.
//
// The first rank of each host is its leader. A reduction runs on every host, then between the
// leaders, and its result is broadcast on every host. So each byte crosses the network once per
// host instead of once per rank, and all ranks get the same result, bit by bit. gather, scatter and
// all_to_all move each byte to only one rank, so they run as one uneven all-to-all of gloo between
// all ranks. A message uses shared memory if both ranks are on one host.
//
// Collectives run one after another on a thread of the group, in the order of their calls. The
// future of each collective is completed on a separate thread, because a callback may wait for a
// later collective.
#pragma once

#include <signal.h>

#include <numeric>
#include <thread>

#include "backend.h"

namespace tutti {

// A collective that is queued or running on the group's thread.
class HierarchyWork : public FutureWork {
   public:
    HierarchyWork(int rank, uint64_t sequence, Call&& call, double timeout_s, const char* title)
        : FutureWork(rank, call.kind->type, title, inputs_of(call, title)),
          call(std::move(call)),
          timeout_s(timeout_s) {
        sequence_ = sequence;
    }

    Call call;
    const double timeout_s;

    bool wait(std::chrono::milliseconds timeout) override {
        std::unique_lock<std::mutex> hold(mutex_);
        auto over = [&] { return completed_; };
        if (timeout == kNoTimeout)
            cv_.wait(hold, over);
        else if (!cv_.wait_for(hold, timeout, over))
            throw Failure(TUTTI_TIMEOUT, c10::str("shm ", call.kind->name, " ", sequence_,
                                                  " has not finished within ", timeout.count(), " ms"));
        if (exception_) std::rethrow_exception(exception_);
        return true;
    }

    std::vector<at::Tensor> result() override { return call.results(); }

    void end(std::exception_ptr error) {
        auto future = mark_completed(error);
        if (!future) return;
        auto self = c10::intrusive_ptr<HierarchyWork>::unsafe_reclaim_from_nonowning(this);
        std::thread([self, future] { self->complete(future); }).detach();
    }
};

// A recv through gloo into a contiguous buffer. The first wait() copies the buffer to the caller's
// tensor.
class CopyingWork : public c10d::Work {
   public:
    CopyingWork(WorkPtr work, Call&& call) : work_(std::move(work)), call_(std::move(call)) {}
    bool isCompleted() override { return work_->isCompleted(); }
    bool isSuccess() const override { return copied_; }
    bool wait(std::chrono::milliseconds timeout) override {
        work_->wait(timeout);
        if (!copied_.exchange(true)) call_.copy_back();
        return true;
    }

   private:
    WorkPtr work_;
    Call call_;
    std::atomic<bool> copied_{false};
};

class HierarchicalBackend : public BackendBase {
   public:
    using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

    // `hosts` contains the ranks of each host. `local` is the core's group of this host's ranks,
    // which this object owns. `leaders` is nullptr on a rank that is not the first of its host.
    HierarchicalBackend(tutti_group* local, std::vector<std::vector<int>> hosts, BackendPtr all,
                        BackendPtr leaders, int rank, int size, std::chrono::milliseconds timeout,
                        std::string name, std::vector<int64_t> global_ranks)
        : BackendBase(rank, size, timeout, std::move(name), std::move(global_ranks)),
          local_(local),
          hosts_(std::move(hosts)),
          all_(std::move(all)),
          leaders_(std::move(leaders)),
          process_(getpid()) {
        std::tie(host_, local_rank_) = host_of(rank);
    }

    ~HierarchicalBackend() override { close(false); }

    int hosts() const { return static_cast<int>(hosts_.size()); }

    void abort() override {
        if (local_) core.group_abort(local_);
        all_->abort();
        if (leaders_) leaders_->abort();
    }

    void shutdown() override { close(true); }

    void setTimeout(std::chrono::milliseconds timeout) override {
        BackendBase::setTimeout(timeout);
        all_->setTimeout(timeout);  // for messages between hosts
    }

    // gloo's monitored barrier names the ranks of all hosts that have not arrived. Queued
    // collectives use the same gloo group, so this method first waits until they have ended.
    void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
        refuse_if_closed(kBarrier);
        pending_->wait_for_none();
        auto limited = opts;
        limited.timeout = timeout_or_default(opts.timeout);
        all_->monitoredBarrier(limited, wait_all_ranks);
    }

   protected:
    void close(bool wait_for_pending) {
        if (!local_ || process_ != getpid()) return;  // a forked child has no thread to join
        if (wait_for_pending)
            pending_->wait_for_none();
        else
            abort();
        {
            std::lock_guard<std::mutex> hold(queue_mutex_);
            closing_ = true;
        }
        queued_.notify_all();
        if (thread_.joinable()) thread_.join();
        core.group_close(std::exchange(local_, nullptr));
        all_->shutdown();
        if (leaders_) leaders_->shutdown();
    }

    bool closed() const override { return !local_; }

    void run(Call& call, uint64_t sequence, double timeout_s) override {
        submit(std::move(call), sequence, timeout_s, nullptr)->wait();
    }

    WorkPtr submit(Call&& call, uint64_t sequence, double timeout_s, const char* title) override {
        if (call.kind->code == TUTTI_SEND || call.kind->code == TUTTI_RECV)
            return message(std::move(call), sequence, timeout_s, title);
        auto work = c10::make_intrusive<HierarchyWork>(rank_, sequence, std::move(call), timeout_s,
                                                       title);
        pending_->add();
        std::lock_guard<std::mutex> hold(queue_mutex_);
        if (!thread_.joinable()) start_thread();
        queue_.push_back(work);
        queued_.notify_one();
        return work;
    }

   private:
    struct Buffer {
        void* data;
        uint64_t bytes;
    };
    using Buffers = std::vector<Buffer>;

    tutti_group* local_;
    const std::vector<std::vector<int>> hosts_;
    BackendPtr all_, leaders_;
    const pid_t process_;
    int host_ = 0, local_rank_ = 0;
    std::mutex queue_mutex_;
    std::condition_variable queued_;
    std::deque<c10::intrusive_ptr<HierarchyWork>> queue_;
    std::thread thread_;
    bool closing_ = false;
    double limit_s_ = 0;  // timeout of the running collective

    // ---- The thread ----

    void start_thread() {
        sigset_t all, before;
        sigfillset(&all);  // signals are handled by the threads of the application
        pthread_sigmask(SIG_SETMASK, &all, &before);
        thread_ = std::thread([this] { run_queue(); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void run_queue() {
        for (;;) {
            c10::intrusive_ptr<HierarchyWork> work;
            {
                std::unique_lock<std::mutex> hold(queue_mutex_);
                queued_.wait(hold, [&] { return closing_ || !queue_.empty(); });
                if (queue_.empty()) return;
                work = std::move(queue_.front());
                queue_.pop_front();
            }
            std::exception_ptr error;
            try {
                at::AutoDispatchBelowADInplaceOrView no_autograd;
                limit_s_ = work->timeout_s;
                dispatch(work->call);
                work->call.copy_back();
            } catch (const Failure& failure) {
                pending_->failed(failure.code);
                error = std::current_exception();
            } catch (...) {
                pending_->failed(TUTTI_SYSTEM);
                error = std::current_exception();
            }
            work->end(error);
            work.reset();
            pending_->remove();
        }
    }

    void dispatch(Call& call) {
        switch (call.kind->code) {
            case TUTTI_BARRIER: return barrier_all();
            case TUTTI_ALL_REDUCE: return all_reduce(call);
            case TUTTI_REDUCE: return reduce_to_root(call);
            case TUTTI_BROADCAST: return broadcast_all(call);
            case TUTTI_ALL_GATHER: return all_gather(call);
            case TUTTI_REDUCE_SCATTER: return reduce_scatter_all(call);
            default: return exchange(call);
        }
    }

    // ---- Collectives in three steps: on the host, between the leaders, on the host ----

    void barrier_all() {
        local(TUTTI_BARRIER, {}, {});
        if (leaders_) leaders_->barrier(within(c10d::BarrierOptions()))->wait();
        local(TUTTI_BARRIER, {}, {});
    }

    void all_reduce(Call& call) {
        Buffer tensor{call.out[0], call.out_bytes[0]};
        local_reduce(call, {call.in[0], call.in_bytes[0]}, tensor);
        if (leaders_) reduce_between_hosts(call, tensor);
        local_broadcast(tensor, 0);
    }

    void reduce_to_root(Call& call) {
        auto [host, root] = host_of(call.root);
        // Only the root's tensor may change.
        at::Tensor scratch;
        Buffer tensor{nullptr, call.in_bytes[0]};
        if (rank_ == call.root) {
            tensor.data = call.out[0];
        } else {
            scratch = bytes(tensor.bytes);
            tensor.data = scratch.mutable_data_ptr();
        }
        local_reduce(call, {call.in[0], call.in_bytes[0]}, tensor);
        if (leaders_) reduce_between_hosts(call, tensor);
        if (host == host_ && root != 0) local_broadcast(tensor, 0);
    }

    void broadcast_all(Call& call) {
        auto [host, root] = host_of(call.root);
        Buffer tensor = call.in.empty() ? Buffer{call.out[0], call.out_bytes[0]}
                                        : Buffer{call.in[0], call.in_bytes[0]};
        if (host == host_ && root != 0) local_broadcast(tensor, root);
        if (leaders_ && tensor.bytes) {
            Tensors tensors{as_bytes(tensor)};
            auto options = within(c10d::BroadcastOptions());
            options.rootRank = host;
            leaders_->broadcast(tensors, options)->wait();
        }
        if (host != host_ || root == 0) local_broadcast(tensor, 0);
    }

    void all_gather(Call& call) {
        // `flat` contains the parts of all ranks, ordered by host and then by rank on the host.
        std::vector<uint64_t> block_bytes;
        for (auto& ranks : hosts_) {
            block_bytes.push_back(0);
            for (int rank : ranks) block_bytes.back() += call.out_bytes[rank];
        }
        uint64_t total = std::accumulate(block_bytes.begin(), block_bytes.end(), uint64_t{0});
        at::Tensor flat = bytes(total);
        auto* memory = static_cast<char*>(flat.mutable_data_ptr());
        char* block = memory;
        for (int host = 0; host < host_; ++host) block += block_bytes[host];
        Buffers parts;
        char* at = block;
        for (int rank : hosts_[host_]) {
            parts.push_back({at, call.out_bytes[rank]});
            at += call.out_bytes[rank];
        }
        local(TUTTI_GATHER, {{call.in[0], call.in_bytes[0]}}, leads() ? parts : Buffers{}, 0);
        uint64_t widest = *std::max_element(block_bytes.begin(), block_bytes.end());
        if (leaders_ && widest) {  // gloo gathers parts of equal size only
            Tensors sent{bytes(widest)};
            std::memcpy(sent[0].mutable_data_ptr(), block, block_bytes[host_]);
            TensorLists padded(1);
            for (size_t host = 0; host < hosts_.size(); ++host) padded[0].push_back(bytes(widest));
            leaders_->allgather(padded, sent, within(c10d::AllgatherOptions()))->wait();
            char* to = memory;
            for (size_t host = 0; host < hosts_.size(); ++host) {
                std::memcpy(to, padded[0][host].const_data_ptr(), block_bytes[host]);
                to += block_bytes[host];
            }
        }
        local_broadcast({memory, total}, 0);
        char* from = memory;
        for (auto& ranks : hosts_)
            for (int rank : ranks) {
                copy(call.out[rank], from, call.out_bytes[rank]);
                from += call.out_bytes[rank];
            }
    }

    void reduce_scatter_all(Call& call) {
        uint64_t total = std::accumulate(call.in_bytes.begin(), call.in_bytes.end(), uint64_t{0});
        at::Tensor flat = bytes(total);
        auto* memory = static_cast<char*>(flat.mutable_data_ptr());
        std::vector<Buffer> part_of;
        char* at = memory;
        for (int rank = 0; rank < size_; ++rank) {
            copy(at, call.in[rank], call.in_bytes[rank]);
            part_of.push_back({at, call.in_bytes[rank]});
            at += call.in_bytes[rank];
        }
        at::Tensor sum = leads() ? bytes(total) : at::Tensor();
        Buffer reduced{leads() ? sum.mutable_data_ptr() : nullptr, total};
        local_reduce(call, {memory, total}, reduced);
        if (leaders_) {
            reduce_between_hosts(call, reduced);
            copy(memory, reduced.data, total);
        }
        Buffers parts;
        for (int rank : hosts_[host_]) parts.push_back(part_of[rank]);
        local(TUTTI_SCATTER, leads() ? parts : Buffers{}, {{call.out[0], call.out_bytes[0]}}, 0);
    }

    // ---- Collectives that move each byte to one rank ----

    void exchange(Call& call) {
        Buffers to(size_, Buffer{nullptr, 0}), back(size_, Buffer{nullptr, 0});
        bool root = rank_ == call.root;
        auto parts = [](auto& memory, auto& sizes) {
            Buffers all;
            for (size_t i = 0; i < memory.size(); ++i) all.push_back({memory[i], sizes[i]});
            return all;
        };
        if (call.kind->code == TUTTI_GATHER) {
            to[call.root] = {call.in[0], call.in_bytes[0]};
            if (root) back = parts(call.out, call.out_bytes);
        } else if (call.kind->code == TUTTI_SCATTER) {
            if (root) to = parts(call.in, call.in_bytes);
            back[call.root] = {call.out[0], call.out_bytes[0]};
        } else {
            to = parts(call.in, call.in_bytes);
            back = parts(call.out, call.out_bytes);
        }
        auto [sent, sent_sizes] = concatenated(to);
        auto [got, got_sizes] = concatenated(back);
        all_->alltoall_base(got, sent, got_sizes, sent_sizes, within(c10d::AllToAllOptions()))->wait();
        auto* from = static_cast<const char*>(got.const_data_ptr());
        for (auto& part : back) {
            copy(part.data, from, part.bytes);
            from += part.bytes;
        }
    }

    static std::pair<at::Tensor, std::vector<int64_t>> concatenated(const Buffers& parts) {
        std::vector<int64_t> sizes;
        for (auto& part : parts) sizes.push_back(static_cast<int64_t>(part.bytes));
        at::Tensor flat = bytes(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
        auto* at = static_cast<char*>(flat.mutable_data_ptr());
        for (auto& part : parts) {
            copy(at, part.data, part.bytes);
            at += part.bytes;
        }
        return {flat, sizes};
    }

    WorkPtr message(Call&& call, uint64_t sequence, double timeout_s, const char* title) {
        TORCH_CHECK_VALUE(call.peer >= 0, "shm recv from any rank is not supported in a group over several "
                          "hosts. Name the source rank.");
        auto [host, local_peer] = host_of(call.peer);
        bool sends = call.kind->code == TUTTI_SEND;
        if (host == host_) {
            call.peer = local_peer;
            auto work =
                c10::make_intrusive<ShmWork>(rank_, sequence, std::move(call), title, pending_);
            work->begin(local_, timeout_s);
            return work;
        }
        if (sends) {
            Tensors tensors{call.kept.empty() ? call.inputs[0] : call.kept[0]};
            return all_->send(tensors, call.peer, static_cast<int>(call.tag));
        }
        Tensors tensors{call.copies.empty() ? call.outputs[0] : call.copies[0].second};
        auto work = all_->recv(tensors, call.peer, static_cast<int>(call.tag));
        if (call.copies.empty()) return work;
        return c10::make_intrusive<CopyingWork>(std::move(work), std::move(call));
    }

    // ---- Steps ----

    bool leads() const { return local_rank_ == 0; }

    std::pair<int, int> host_of(int rank) const {
        for (size_t host = 0; host < hosts_.size(); ++host)
            for (size_t i = 0; i < hosts_[host].size(); ++i)
                if (hosts_[host][i] == rank) return {static_cast<int>(host), static_cast<int>(i)};
        TORCH_CHECK_VALUE(false, "shm: rank ", rank, " is not in group ", name_);
    }

    // Runs one operation of the core between the ranks of this host.
    void local(uint32_t kind, const Buffers& in, const Buffers& out, int root = -1,
               uint32_t dtype = TUTTI_BYTES, uint32_t reduce = TUTTI_SUM) {
        c10::SmallVector<void*, 8> in_data, out_data;
        c10::SmallVector<uint64_t, 8> in_bytes, out_bytes;
        for (auto& part : in) in_data.push_back(part.data), in_bytes.push_back(part.bytes);
        for (auto& part : out) out_data.push_back(part.data), out_bytes.push_back(part.bytes);
        tutti_operation operation{};
        operation.kind = kind;
        operation.dtype = dtype;
        operation.reduce = reduce;
        operation.root = root;
        operation.peer = -1;
        operation.in_parts = in_data.size();
        operation.out_parts = out_data.size();
        operation.in = in_data.data();
        operation.in_bytes = in_bytes.data();
        operation.out = out_data.data();
        operation.out_bytes = out_bytes.data();
        int code = core.run(local_, &operation, limit_s_);
        if (code != TUTTI_OK) throw Failure(code, core.error());
    }

    void local_broadcast(Buffer buffer, int root) {
        if (local_rank_ == root)
            local(TUTTI_BROADCAST, {buffer}, {}, root);
        else
            local(TUTTI_BROADCAST, {}, {buffer}, root);
    }

    // Reduces to the leader. A mean is computed as a sum here. reduce_between_hosts divides the sum
    // by the number of ranks of the whole group.
    void local_reduce(const Call& call, Buffer in, Buffer out) {
        uint32_t reduce = call.reduce == TUTTI_AVG ? uint32_t{TUTTI_SUM} : call.reduce;
        local(TUTTI_REDUCE, {in}, leads() ? Buffers{out} : Buffers{}, 0, call.dtype, reduce);
    }

    // Called only by leaders. Reduces in place over the hosts. gloo cannot reduce int16 and bool,
    // so these dtypes are converted to int32 and uint8.
    void reduce_between_hosts(const Call& call, Buffer buffer) {
        if (!buffer.bytes) return;
        at::Tensor tensor = as_tensor(buffer, scalar_type(call.dtype)), converted = tensor;
        uint32_t reduce = call.reduce == TUTTI_AVG ? uint32_t{TUTTI_SUM} : call.reduce;
        if (call.dtype == TUTTI_I16) converted = tensor.to(at::kInt);
        if (call.dtype == TUTTI_BOOL) {
            converted = tensor.to(at::kByte);
            if (reduce == TUTTI_SUM || reduce == TUTTI_BOR) reduce = TUTTI_MAX;
            if (reduce == TUTTI_PRODUCT || reduce == TUTTI_BAND) reduce = TUTTI_MIN;
        }
        Tensors tensors{converted};
        auto options = within(c10d::AllreduceOptions());
        options.reduceOp = c10d::ReduceOp(static_cast<c10d::ReduceOp::RedOpType>(reduce));
        leaders_->allreduce(tensors, options)->wait();
        if (call.reduce == TUTTI_AVG) converted.div_(size_);
        if (!converted.is_same(tensor)) tensor.copy_(converted);
    }

    // Returns the options with the timeout of the running collective.
    template <class Options>
    Options within(Options options) const {
        options.timeout = std::chrono::milliseconds(static_cast<int64_t>(limit_s_ * 1000));
        return options;
    }

    static at::ScalarType scalar_type(uint32_t dtype) {
        static constexpr at::ScalarType types[] = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16,
                                                   at::kLong,   at::kInt,   at::kShort, at::kChar,
                                                   at::kByte,   at::kBool,  at::kByte};
        return types[dtype];
    }

    static at::Tensor bytes(int64_t count) { return at::empty({count}, at::kByte); }

    static at::Tensor as_tensor(Buffer buffer, at::ScalarType type) {
        auto count = static_cast<int64_t>(buffer.bytes / c10::elementSize(type));
        return at::from_blob(buffer.data, {count}, at::TensorOptions(type));
    }

    static at::Tensor as_bytes(Buffer buffer) { return as_tensor(buffer, at::kByte); }

    static void copy(void* to, const void* from, uint64_t bytes) {
        if (bytes && to != from) std::memcpy(to, from, bytes);
    }
};

}  // namespace tutti
