// The shm backend's operations as torch calls them: each method says which memory is read and
// written; `issue` (group.h) does it.
#pragma once

#include "group.h"
#include "sparse.h"

namespace tutti {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

constexpr int64_t kFlatBytes = 1 << 20;  // small tensors up to this sum travel as one

class ShmBackend : public ShmGroup {
   public:
    using ShmGroup::ShmGroup;

    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
        Call call(kAllReduce);
        const at::Tensor& tensor = only(tensors, call);
        if (C10_UNLIKELY(tensor.is_sparse() && tensor.is_cpu()))
            return allreduce_sparse(tensors[0], opts);
        call.updates(tensor);
        call.reduces(opts.reduceOp);
        return issue(std::move(call), opts.asyncOp, opts.timeout);
    }

    // How much each rank has is known only once all have said so: this waits for them.
    WorkPtr allreduce_sparse(at::Tensor& tensor, const c10d::AllreduceOptions& opts) {
        auto op = opts.reduceOp.op_;
        TORCH_CHECK_VALUE(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG,
                          "shm all_reduce: sparse tensors can be summed or averaged only");
        sum_sparse(tensor, size_, op == c10d::ReduceOp::AVG,
                   [&](const at::Tensor& mine, const Tensors& outs) {
                       Call call(kAllGather);
                       call.reads(mine);
                       for (auto& out : outs) call.writes(out);
                       issue(std::move(call), false, opts.timeout)->wait();
                   });
        return c10::make_intrusive<Finished>(Tensors{tensor});
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
                    call.stand_ins.emplace_back(tensor, piece);
                    from += tensor.numel();
                }
            }
            call.updates(flat);
            call.outputs.assign(tensors.begin(), tensors.end());
            call.reduces(opts.reduceOp);
            return issue(std::move(call), opts.asyncOp, opts.timeout);
        }
        return each(tensors.size(), opts.asyncOp, [&](size_t i) {
            Tensors one{tensors[i]};
            return allreduce(one, opts);
        });
    }

    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
        Call call(kBroadcast);
        call.root = checked_root(opts.rootRank, call);
        auto& tensor = only(tensors, call);
        if (rank_ == call.root)
            call.reads(tensor), call.outputs.push_back(tensor);
        else
            call.writes(tensor);
        return issue(std::move(call), opts.asyncOp, opts.timeout);
    }

    WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
        Call call(kReduce);
        call.root = checked_root(opts.rootRank, call);
        auto& tensor = only(tensors, call);
        if (rank_ == call.root)
            call.updates(tensor);
        else
            call.reads(tensor), call.outputs.push_back(tensor);
        call.reduces(opts.reduceOp);
        return issue(std::move(call), opts.asyncOp, opts.timeout);
    }

    WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                      const c10d::AllgatherOptions& opts) override {
        Call call(kAllGather);
        call.reads(only(inputs, call));
        for (auto& output : only_list(outputs, call)) call.writes(output);
        same(call.in_bytes[0], call.out_bytes[rank_], call);
        return issue(std::move(call), opts.asyncOp, opts.timeout);
    }

    WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                            const c10d::AllgatherOptions& opts) override {
        Call call(kAllGather);
        call.reads(input);
        call.writes_cut(output, size_);
        same(call.in_bytes[0], call.out_bytes[rank_], call);
        return issue(std::move(call), opts.asyncOp, opts.timeout);
    }

    WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) override {
        // outputs[rank][i] is that rank's inputs[i], as gloo has it.
        return each(inputs.size(), opts.asyncOp, [&](size_t i) {
            TensorLists list(1);
            for (auto& outputs_of_rank : outputs) list[0].push_back(outputs_of_rank.at(i));
            Tensors one{inputs[i]};
            return allgather(list, one, opts);
        });
    }

    WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) override {
        pairs(outputs, inputs, kAllGather);
        return each(inputs.size(), opts.asyncOp,
                    [&](size_t i) { return _allgather_base(outputs[i], inputs[i], opts); });
    }

    WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                           const c10d::ReduceScatterOptions& opts) override {
        Call call(kReduceScatter);
        for (auto& input : only_list(inputs, call)) call.reads(input);
        call.writes(only(outputs, call));
        same(call.in_bytes[rank_], call.out_bytes[0], call);
        call.reduces(opts.reduceOp);
        return issue(std::move(call), opts.asyncOp, opts.timeout);
    }

    WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::ReduceScatterOptions& opts) override {
        Call call(kReduceScatter);
        call.reads_cut(input, size_);
        call.writes(output);
        same(call.in_bytes[rank_], call.out_bytes[0], call);
        call.reduces(opts.reduceOp);
        return issue(std::move(call), opts.asyncOp, opts.timeout);
    }

    WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::ReduceScatterOptions& opts) override {
        pairs(outputs, inputs, kReduceScatter);
        return each(inputs.size(), opts.asyncOp,
                    [&](size_t i) { return _reduce_scatter_base(outputs[i], inputs[i], opts); });
    }

    WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
        Call call(kGather);
        call.root = checked_root(opts.rootRank, call);
        call.reads(only(inputs, call));
        if (rank_ == call.root) {
            for (auto& output : only_list(outputs, call)) call.writes(output);
            same(call.in_bytes[0], call.out_bytes[rank_], call);
        }
        return issue(std::move(call), opts.asyncOp, opts.timeout);
    }

    WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                    const c10d::ScatterOptions& opts) override {
        Call call(kScatter);
        call.root = checked_root(opts.rootRank, call);
        if (rank_ == call.root)
            for (auto& input : only_list(inputs, call)) call.reads(input);
        call.writes(only(outputs, call));
        if (rank_ == call.root) same(call.in_bytes[rank_], call.out_bytes[0], call);
        return issue(std::move(call), opts.asyncOp, opts.timeout);
    }

    WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
        Call call(kAllToAll);
        for (auto* list : {&outputs, &inputs})
            TORCH_CHECK_VALUE(static_cast<int>(list->size()) == size_, "shm all_to_all: ", list->size(),
                        " tensors for ", size_, " ranks");
        for (auto& input : inputs) call.reads(input);
        for (auto& output : outputs) call.writes(output);
        return issue(std::move(call), opts.asyncOp, opts.timeout);
    }

    WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows,
                          std::vector<int64_t>& input_rows,
                          const c10d::AllToAllOptions& opts) override {
        Call call(kAllToAll);
        call.reads_cut(input, size_, input_rows);
        call.writes_cut(output, size_, output_rows);
        return issue(std::move(call), opts.asyncOp, opts.timeout);
    }

    WorkPtr send(Tensors& tensors, int to, int tag) override {
        Call call(kSend);
        call.peer = to;
        call.tag = static_cast<uint32_t>(tag);
        call.reads(only(tensors, call));
        call.dtype = TUTTI_BYTES;  // a message may be received as another dtype of the same size
        return issue(std::move(call), true, c10d::kUnsetTimeout);
    }

    WorkPtr recv(Tensors& tensors, int from, int tag) override {
        Call call(kRecv);
        call.peer = from;
        call.tag = static_cast<uint32_t>(tag);
        call.writes(only(tensors, call));
        call.dtype = TUTTI_BYTES;
        return issue(std::move(call), true, c10d::kUnsetTimeout);
    }

    WorkPtr recvAnysource(Tensors& tensors, int tag) override { return recv(tensors, -1, tag); }

    WorkPtr barrier(const c10d::BarrierOptions& opts) override {
        return issue(Call(kBarrier), opts.asyncOp, opts.timeout);
    }

    void monitoredBarrier(const c10d::BarrierOptions& opts, bool) override {
        issue(Call(kBarrier), false, opts.timeout);
    }

   private:
    const at::Tensor& only(const Tensors& tensors, const Call& call) const {
        TORCH_CHECK_VALUE(tensors.size() == 1, "shm ", call.kind->name, " takes one tensor, got ",
                    tensors.size());
        return tensors[0];
    }

    const Tensors& only_list(const TensorLists& lists, const Call& call) const {
        TORCH_CHECK_VALUE(lists.size() == 1, "shm ", call.kind->name, " takes one list of tensors, got ",
                    lists.size());
        TORCH_CHECK_VALUE(static_cast<int>(lists[0].size()) == size_, "shm ", call.kind->name, ": ",
                    lists[0].size(), " tensors for ", size_, " ranks");
        return lists[0];
    }

    int32_t checked_root(int64_t root, const Call& call) const {
        TORCH_CHECK_VALUE(0 <= root && root < size_, "shm ", call.kind->name, ": root ", root,
                    " is not a rank of a group of ", size_);
        return static_cast<int32_t>(root);
    }

    void same(uint64_t mine, uint64_t place, const Call& call) const {
        TORCH_CHECK_VALUE(mine == place, "shm ", call.kind->name, ": rank ", rank_, " has ", mine,
                    " bytes for a place of ", place);
    }

    static void pairs(const Tensors& outputs, const Tensors& inputs, const Kind& kind) {
        TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "shm ", kind.name, ": ", inputs.size(),
                    " inputs, ", outputs.size(), " outputs");
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
