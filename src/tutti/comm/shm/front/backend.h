// torch's backend methods, shared by the backend of one host (single_host.h) and the backend over
// several hosts (hierarchy.h). Each method describes the memory that is read and written (Call).
// issue() adds profiling and coalescing and passes the call to the subclass. The subclass runs or
// queues the call.
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
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

// Set in debug mode only: returns the source location of the current call.
inline std::atomic<std::function<std::string()>*> where_hook{nullptr};
// Creates the backend of a subgroup, for ProcessGroup::splitGroup.
using Maker = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>&, int rank, int size, std::chrono::milliseconds,
    const std::string& name)>;
inline Maker maker;

// Coalesced tensors of at most this many bytes in total are copied into one flat tensor.
constexpr int64_t kFlatBytes = 1 << 20;

// Sums sparse tensors: every rank gathers the indices and values of all ranks and adds them in the
// order of ranks. `gather(local, outs)` is a blocking all_gather.
template <class Gather>
void sum_sparse(const at::Tensor& tensor, int size, bool mean, Gather gather) {
    at::AutoDispatchBelowADInplaceOrView raw;
    at::Tensor local = tensor.coalesce();
    // The shape, the number of sparse dimensions and the dtype must be the same on all ranks. The
    // number of elements may differ.
    std::vector<int64_t> about(local.sizes().begin(), local.sizes().end());
    about.push_back(local.sparse_dim());
    about.push_back(static_cast<int64_t>(local.scalar_type()));
    about.push_back(local._nnz());
    at::Tensor mine_about = at::tensor(about, at::kLong);
    std::vector<at::Tensor> all_about, indices, values;
    for (int rank = 0; rank < size; ++rank) all_about.push_back(at::empty_like(mine_about));
    gather(mine_about, all_about);
    auto expected = mine_about.slice(0, 0, -1);
    int64_t all = 0;
    for (int rank = 0; rank < size; ++rank) {
        TORCH_CHECK_VALUE(at::equal(all_about[rank].slice(0, 0, -1), expected),
                          "shm all_reduce of sparse tensors: rank ", rank,
                          " has a different shape, dtype or number of sparse dimensions");
        int64_t count = all_about[rank][-1].item<int64_t>();
        auto shape = local._values().sizes().vec();
        shape[0] = count;
        indices.push_back(at::empty({local.sparse_dim(), count}, at::kLong));
        values.push_back(at::empty(shape, local._values().options()));
        all += count;
    }
    if (all > 0) {
        gather(local._indices().contiguous(), indices);
        gather(local._values().contiguous(), values);
    }
    at::Tensor sum;
    for (int rank = 0; rank < size; ++rank) {
        auto part = at::_sparse_coo_tensor_unsafe(indices[rank], values[rank], local.sizes(),
                                                  local._values().options().layout(at::kSparse));
        sum = sum.defined() ? sum.add(part) : part;
    }
    if (mean) sum = sum.div(size);
    tensor.copy_(sum.coalesce());
}


class BackendBase : public c10d::Backend {
   public:
    BackendBase(int rank, int size, std::chrono::milliseconds timeout, std::string name,
                std::vector<int64_t> global_ranks)
        : Backend(rank, size),
          timeout_(timeout),
          name_(std::move(name)),
          global_ranks_(std::move(global_ranks)),
          pending_(std::make_shared<Pending>()),
          completed_(c10::make_intrusive<CompletedWork>()) {}

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
        auto found = std::find(ranks.begin(), ranks.end(), rank_);
        if (found == ranks.end()) return nullptr;
        return maker(store, static_cast<int>(found - ranks.begin()),
                     static_cast<int>(ranks.size()), options->timeout, options->group_name);
    }

    c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                            const c10::intrusive_ptr<Options>& options,
                                            const int& rank, const int& size) override {
        return maker(store, rank, size, options->timeout, options->group_name);
    }

    void startCoalescing() override {
        coalescing_ = true;
        coalesced_.clear();
    }

    WorkPtr endCoalescing() override {
        coalescing_ = false;
        auto left = std::exchange(coalesced_, {});
        return coalesce({left.begin(), left.end()});
    }

    // ---- Operations. Wrong arguments raise ValueError or TypeError before data is sent. ----

    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
        const at::Tensor& tensor = only(tensors, kAllReduce);
        if (C10_UNLIKELY(tensor.is_sparse() && tensor.is_cpu()))
            return allreduce_sparse(tensors[0], opts);
        return issue(all_reduce_call(tensor, opts), opts);
    }

    // The ranks first exchange their numbers of elements, so this call blocks until all ranks have
    // called it.
    WorkPtr allreduce_sparse(at::Tensor& tensor, const c10d::AllreduceOptions& opts) {
        auto op = opts.reduceOp.op_;
        TORCH_CHECK_VALUE(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG,
                          "shm all_reduce: sparse tensors can only be summed or averaged");
        c10d::AllgatherOptions blocking;
        blocking.timeout = opts.timeout;
        blocking.asyncOp = false;
        sum_sparse(tensor, size_, op == c10d::ReduceOp::AVG,
                   [&](const at::Tensor& local, const Tensors& outs) {
                       issue(all_gather_call(outs, local), blocking)->wait();
                   });
        return c10::make_intrusive<CompletedWork>(Tensors{tensor});
    }

    WorkPtr allreduce_coalesced(Tensors& tensors,
                                const c10d::AllreduceCoalescedOptions& opts) override {
        if (fits_flat(tensors)) {
            Call call(kAllReduce);
            Tensors pieces;
            at::Tensor flat;
            {
                at::AutoDispatchBelowADInplaceOrView raw;
                for (auto& tensor : tensors) pieces.push_back(tensor.reshape({-1}));
                flat = at::cat(pieces);
                int64_t from = 0;
                for (auto& tensor : tensors) {
                    auto piece = flat.narrow(0, from, tensor.numel()).view(tensor.sizes());
                    call.copies.emplace_back(tensor, piece);
                    from += tensor.numel();
                }
            }
            call.updates(flat);
            call.outputs.assign(tensors.begin(), tensors.end());
            call.reduces(opts.reduceOp);
            return issue(std::move(call), opts);
        }
        return each(tensors.size(), kAllReduce, opts,
                    [&](size_t i) { return all_reduce_call(tensors[i], opts); });
    }

    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
        Call call(kBroadcast);
        call.root = checked_root(opts.rootRank, kBroadcast, opts.rootTensor);
        auto& tensor = only(tensors, kBroadcast);
        if (rank_ == call.root)
            call.reads(tensor), call.outputs.push_back(tensor);
        else
            call.writes(tensor);
        return issue(std::move(call), opts);
    }

    WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
        Call call(kReduce);
        call.root = checked_root(opts.rootRank, kReduce, opts.rootTensor);
        auto& tensor = only(tensors, kReduce);
        if (rank_ == call.root)
            call.updates(tensor);
        else
            call.reads(tensor), call.outputs.push_back(tensor);
        call.reduces(opts.reduceOp);
        return issue(std::move(call), opts);
    }

    WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                      const c10d::AllgatherOptions& opts) override {
        return issue(all_gather_call(only_list(outputs, kAllGather), only(inputs, kAllGather)), opts);
    }

    WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                            const c10d::AllgatherOptions& opts) override {
        return issue(all_gather_flat_call(output, input), opts);
    }

    WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) override {
        // outputs[rank][i] receives that rank's inputs[i], as with gloo.
        one_per_rank(outputs.size(), kAllGather);
        for (auto& outputs_of_rank : outputs) pairs(outputs_of_rank, inputs, kAllGather);
        return each(inputs.size(), kAllGather, opts, [&](size_t i) {
            Tensors list;
            for (auto& outputs_of_rank : outputs) list.push_back(outputs_of_rank[i]);
            return all_gather_call(list, inputs[i]);
        });
    }

    WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) override {
        pairs(outputs, inputs, kAllGather);
        return each(inputs.size(), kAllGather, opts,
                    [&](size_t i) { return all_gather_flat_call(outputs[i], inputs[i]); });
    }

    WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                           const c10d::ReduceScatterOptions& opts) override {
        Call call(kReduceScatter);
        auto& list = only_list(inputs, kReduceScatter);
        auto& output = only(outputs, kReduceScatter);
        same_shape(list[rank_], output, kReduceScatter);
        for (auto& input : list) call.reads(input);
        call.writes(output);
        call.reduces(opts.reduceOp);
        return issue(std::move(call), opts);
    }

    WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::ReduceScatterOptions& opts) override {
        return issue(reduce_scatter_flat_call(output, input, opts), opts);
    }

    WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::ReduceScatterOptions& opts) override {
        pairs(outputs, inputs, kReduceScatter);
        return each(inputs.size(), kReduceScatter, opts,
                    [&](size_t i) { return reduce_scatter_flat_call(outputs[i], inputs[i], opts); });
    }

    WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
        Call call(kGather);
        call.root = checked_root(opts.rootRank, kGather);
        auto& input = only(inputs, kGather);
        call.reads(input);
        if (rank_ == call.root) {
            auto& list = only_list(outputs, kGather);
            same_shape(input, list[rank_], kGather);
            for (auto& output : list) call.writes(output);
        } else {
            only_at_root(outputs, call);
        }
        return issue(std::move(call), opts);
    }

    WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                    const c10d::ScatterOptions& opts) override {
        Call call(kScatter);
        call.root = checked_root(opts.rootRank, kScatter);
        auto& output = only(outputs, kScatter);
        if (rank_ == call.root) {
            auto& list = only_list(inputs, kScatter);
            same_shape(list[rank_], output, kScatter);
            for (auto& input : list) call.reads(input);
        } else {
            only_at_root(inputs, call);
        }
        call.writes(output);
        return issue(std::move(call), opts);
    }

    WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
        Call call(kAllToAll);
        one_per_rank(outputs.size(), kAllToAll);
        one_per_rank(inputs.size(), kAllToAll);
        same_shape(inputs[rank_], outputs[rank_], kAllToAll);
        for (auto& input : inputs) call.reads(input);
        for (auto& output : outputs) call.writes(output);
        return issue(std::move(call), opts);
    }

    WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows,
                          std::vector<int64_t>& input_rows,
                          const c10d::AllToAllOptions& opts) override {
        Call call(kAllToAll);
        call.reads_split(input, size_, input_rows);
        call.writes_split(output, size_, output_rows);
        return issue(std::move(call), opts);
    }

    WorkPtr send(Tensors& tensors, int to, int tag) override {
        Call call(kSend);
        call.peer = to;
        call.tag = checked_tag(tag, kSend);
        call.reads(only(tensors, kSend));
        return issue_message(std::move(call));
    }

    WorkPtr recv(Tensors& tensors, int from, int tag) override {
        TORCH_CHECK_VALUE(from >= 0, "shm recv: source ", from, " is not a rank of this group, which has ", size_, " ranks");
        return recv_from(tensors, from, tag);
    }

    WorkPtr recvAnysource(Tensors& tensors, int tag) override { return recv_from(tensors, -1, tag); }

    WorkPtr barrier(const c10d::BarrierOptions& opts) override {
        return issue(Call(kBarrier), opts);
    }

    // The argument `wait_all_ranks` has no effect, because the core's error always names all ranks
    // that have not arrived.
    void monitoredBarrier(const c10d::BarrierOptions& opts, bool) override {
        auto blocking = opts;
        blocking.asyncOp = false;
        issue(Call(kBarrier), blocking)->wait();
    }

   protected:
    std::chrono::milliseconds timeout_;
    const std::string name_;
    const std::vector<int64_t> global_ranks_;
    std::shared_ptr<Pending> pending_;
    c10::intrusive_ptr<CompletedWork> completed_;

    virtual bool closed() const = 0;
    void refuse_if_closed(const Kind& kind) const {
        if (C10_UNLIKELY(closed()))
            throw Failure(TUTTI_CLOSED, c10::str("shm ", kind.name, ": group ", name_,
                                                 " is closed, because this rank has destroyed it"));
    }
    std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) const {
        return timeout == c10d::kUnsetTimeout ? timeout_ : timeout;
    }
    // Runs a call and returns when it has ended.
    virtual void run(Call& call, uint64_t sequence, double timeout_s) = 0;
    // Begins a call and returns its Work. `title` is the name of its span for the profiler, or
    // nullptr.
    virtual WorkPtr submit(Call&& call, uint64_t sequence, double timeout_s, const char* title) = 0;

   private:
    std::atomic<uint64_t> sequence_{0};
    bool coalescing_ = false;
    std::deque<WorkPtr> coalesced_;  // operations that are unfinished or failed

    template <class Options>
    WorkPtr issue(Call&& call, const Options& opts) {
        return issue(std::move(call), opts.asyncOp, opts.timeout);
    }

    WorkPtr issue(Call&& call, bool async, std::chrono::milliseconds timeout) {
        refuse_if_closed(*call.kind);
        if (auto* hook = where_hook.load(std::memory_order_acquire); C10_UNLIKELY(hook != nullptr))
            call.where = (*hook)();
        uint64_t sequence = ++sequence_;
        double timeout_s = timeout_or_default(timeout).count() / 1000.0;
        bool queued = async || coalescing_;
        if (C10_LIKELY(!at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION))) {
            if (queued) return enqueue(std::move(call), sequence, timeout_s, nullptr);
            run(call, sequence, timeout_s);
            return completed_;
        }
        return profiled(std::move(call), sequence, timeout_s, queued);
    }

    WorkPtr enqueue(Call&& call, uint64_t sequence, double timeout_s, const char* title) {
        auto work = submit(std::move(call), sequence, timeout_s, title);
        if (coalescing_) {
            // If an exception leaves a coalescing block, endCoalescing() is never called. Therefore
            // operations that have succeeded are removed here, so that their tensors are freed.
            while (!coalesced_.empty() && coalesced_.front()->isCompleted() &&
                   coalesced_.front()->isSuccess())
                coalesced_.pop_front();
            coalesced_.push_back(work);
        }
        return work;
    }

    // Records the call for the profiler, with the same names and metadata as NCCL traces.
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
        if (queued) return enqueue(std::move(call), sequence, timeout_s, title);
        run_with_span(call, sequence, timeout_s);
        return completed_;
    }

    void run_with_span(Call& call, uint64_t sequence, double timeout_s) {
        RECORD_FUNCTION(call.kind->title,
                        std::vector<c10::IValue>(call.inputs.begin(), call.inputs.end()));
        run(call, sequence, timeout_s);
    }

    // ---- Calls from checked arguments ----

    Call all_reduce_call(const at::Tensor& tensor, const c10d::AllreduceOptions& opts) const {
        Call call(kAllReduce);
        call.updates(tensor);
        call.reduces(opts.reduceOp);
        return call;
    }

    // The tensors of different ranks may have different shapes, as with NCCL. The sizes in
    // `outputs` must be the same on all ranks.
    Call all_gather_call(const Tensors& outputs, const at::Tensor& input) const {
        Call call(kAllGather);
        same_shape(input, outputs[rank_], kAllGather);
        call.reads(input);
        for (auto& output : outputs) call.writes(output);
        return call;
    }

    Call all_gather_flat_call(const at::Tensor& output, const at::Tensor& input) const {
        Call call(kAllGather);
        call.reads(input);
        call.writes_split(output, size_);
        same_bytes(call.in_bytes[0], call.out_bytes[rank_], kAllGather);
        return call;
    }

    Call reduce_scatter_flat_call(const at::Tensor& output, const at::Tensor& input,
                                  const c10d::ReduceScatterOptions& opts) const {
        Call call(kReduceScatter);
        call.reads_split(input, size_);
        call.writes(output);
        same_bytes(call.in_bytes[rank_], call.out_bytes[0], kReduceScatter);
        call.reduces(opts.reduceOp);
        return call;
    }

    WorkPtr recv_from(Tensors& tensors, int from, int tag) {
        Call call(kRecv);
        call.peer = from;
        call.tag = checked_tag(tag, kRecv);
        call.writes(only(tensors, kRecv));
        return issue_message(std::move(call));
    }

    WorkPtr issue_message(Call&& call) {
        call.dtype = TUTTI_BYTES;  // a message may be received as another dtype of the same size
        return issue(std::move(call), true, c10d::kUnsetTimeout);
    }

    // Issues the calls make_call(0), make_call(1), ..., after all calls have been checked. Returns
    // one Work for all calls.
    template <class Options, class MakeCall>
    WorkPtr each(size_t count, const Kind& kind, const Options& opts, MakeCall make_call) {
        TORCH_CHECK_VALUE(count > 0, "shm ", kind.name, ": the list of tensors is empty");
        std::vector<Call> calls;
        calls.reserve(count);
        for (size_t i = 0; i < count; ++i) calls.push_back(make_call(i));
        std::vector<WorkPtr> works;
        for (auto& call : calls) works.push_back(issue(std::move(call), opts));
        if (!opts.asyncOp && !coalescing_) return completed_;
        return coalesce(std::move(works));
    }

    WorkPtr coalesce(std::vector<WorkPtr> works) {
        auto all = c10::make_intrusive<CoalescedWork>(rank_, std::move(works));
        all->begin();
        return all;
    }

    // ---- Checks of arguments ----

    static const at::Tensor& only(const Tensors& tensors, const Kind& kind) {
        TORCH_CHECK_VALUE(tensors.size() == 1, "shm ", kind.name, " takes one tensor, got ",
                          tensors.size());
        return tensors[0];
    }

    const Tensors& only_list(const TensorLists& lists, const Kind& kind) const {
        TORCH_CHECK_VALUE(lists.size() == 1, "shm ", kind.name, " takes one list of tensors, got ",
                          lists.size());
        one_per_rank(lists[0].size(), kind);
        return lists[0];
    }

    void one_per_rank(size_t count, const Kind& kind) const {
        TORCH_CHECK_VALUE(static_cast<int>(count) == size_, "shm ", kind.name, ": the list must have ",
                          size_, " entries (one for each rank), got ", count);
    }

    void only_at_root(const TensorLists& lists, const Call& call) const {
        for (auto& list : lists)
            TORCH_CHECK_VALUE(list.empty(), "shm ", call.kind->name, ": rank ", rank_, " passed a list of ",
                              list.size(), " tensors, which only the root, rank ", call.root, ", may pass");
    }

    int32_t checked_root(int64_t root, const Kind& kind, int64_t root_tensor = 0) const {
        TORCH_CHECK_VALUE(0 <= root && root < size_, "shm ", kind.name, ": root ", root,
                          " is not a rank of this group, which has ", size_, " ranks");
        TORCH_CHECK_VALUE(root_tensor == 0, "shm ", kind.name, ": rootTensor ", root_tensor,
                          " is not supported, because shm takes one tensor per rank. Use 0.");
        return static_cast<int32_t>(root);
    }

    static uint32_t checked_tag(int tag, const Kind& kind) {
        TORCH_CHECK_VALUE(tag >= 0, "shm ", kind.name, ": tag ", tag, " is negative");
        return static_cast<uint32_t>(tag);
    }

    // Checks the tensor that this rank sends to itself.
    void same_shape(const at::Tensor& sent, const at::Tensor& received, const Kind& kind) const {
        TORCH_CHECK_VALUE(sent.sizes() == received.sizes(), "shm ", kind.name, ": rank ", rank_,
                          " sends itself a tensor of shape ", sent.sizes(),
                          " and receives it into shape ", received.sizes());
    }

    void same_bytes(uint64_t bytes, uint64_t expected, const Kind& kind) const {
        TORCH_CHECK_VALUE(bytes == expected, "shm ", kind.name, ": rank ", rank_, " sends itself ",
                          bytes, " bytes, but receives them into ", expected, " bytes");
    }

    static void pairs(const Tensors& outputs, const Tensors& inputs, const Kind& kind) {
        TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "shm ", kind.name,
                          ": each input needs one output, got ", inputs.size(), " inputs and ",
                          outputs.size(), " outputs");
    }

    static bool fits_flat(const Tensors& tensors) {
        if (tensors.size() < 2) return false;
        int64_t bytes = 0;
        for (auto& tensor : tensors) {
            if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided ||
                tensor.scalar_type() != tensors[0].scalar_type())
                return false;
            bytes += tensor.nbytes();
        }
        return bytes <= kFlatBytes;
    }
};

}  // namespace tutti
