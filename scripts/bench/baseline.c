/* The asic stage's data path once more, in C: what scripts/bench/fastpath measures dpu/fastpath/asic.py against.
 *
 * One pass over a controller's queues with memory namespaces: the same records (layout.h is generated from
 * dpu/layout.py), the same checks, the same PRP walk through the same DMA table with the same hint, the same states
 * stored in the same order, the same counters, stamps and histogram, the same completions, one eventfd write per CQ
 * and pass. Both work on the same memory, so after the same commands every table must hold the same bytes.
 *
 * What the benchmark never meets (files, control, replay) ends in abort(). No product code uses this file.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <x86intrin.h>

#include "layout.h"

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define AT(type, address) ((struct type *)(address))

enum { OP_FLUSH = 0, OP_WRITE = 1, OP_READ = 2, OP_COMPARE = 5, OP_ZEROES = 8, OP_DSM = 9 };
enum {
    DNR = 1 << 14,
    INVALID_OPCODE = 0x1 | DNR,
    INVALID_FIELD = 0x2 | DNR,
    DATA_TRANSFER = 0x4 | DNR,
    INVALID_NAMESPACE = 0xB | DNR,
    PRP_OFFSET = 0x13 | DNR,
    LBA_RANGE = 0x80 | DNR,
    WRITE_PROTECTED = 0x20 | DNR,
    COMPARE_FAILURE = 0x285 | DNR,
};

static inline uint32_t load32(int64_t at) { return __atomic_load_n((uint32_t *)at, __ATOMIC_ACQUIRE); }
static inline int64_t load64(int64_t at) { return __atomic_load_n((int64_t *)at, __ATOMIC_ACQUIRE); }
static inline void store32(int64_t at, uint32_t v) { __atomic_store_n((uint32_t *)at, v, __ATOMIC_RELEASE); }
static inline void store64(int64_t *at, int64_t v) { __atomic_store_n(at, v, __ATOMIC_RELEASE); }

static int64_t dma_find(const struct CONTROLLER *c, struct QUEUE_LOCAL *local, int64_t iova, int64_t size, int64_t rights)
{
    const struct REGION *regions = AT(REGION, c->dma);
    int64_t hint = local->region, low = 0, high = c->dma_count;
    if (LIKELY(hint < high)) {
        const struct REGION *r = &regions[hint];
        int64_t offset = iova - r->iova;
        if (iova >= r->iova && offset < r->length)
            return size <= r->length - offset && (r->rights & rights) == rights ? r->host + offset : 0;
    }
    while (low < high) {
        int64_t middle = (low + high) >> 1;
        if (regions[middle].iova <= iova)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == 0)
        return 0;
    const struct REGION *r = &regions[low - 1];
    int64_t offset = iova - r->iova;
    if (offset < r->length && size <= r->length - offset && (r->rights & rights) == rights) {
        local->region = low - 1;
        return r->host + offset;
    }
    return 0;
}

static inline int64_t add_segment(const struct CONTROLLER *c, struct QUEUE_LOCAL *local, struct SEGMENT *out,
                                  int64_t count, int64_t iova, int64_t size, int64_t rights)
{
    int64_t host = dma_find(c, local, iova, size, rights);
    if (host == 0)
        return -1;
    if (count > 0 && out[count - 1].host + out[count - 1].length == host) {
        out[count - 1].length += size;
        return count;
    }
    out[count].host = host;
    out[count].length = size;
    return count + 1;
}

static int64_t walk_prps(const struct CONTROLLER *c, struct QUEUE_LOCAL *local, const struct SQE *sqe, int64_t length,
                         int64_t rights, struct SEGMENT *out)
{
    int64_t iova = sqe->prp1, offset = iova & (PAGE - 1);
    if (offset & 3)
        return -PRP_OFFSET;
    int64_t size = PAGE - offset < length ? PAGE - offset : length;
    int64_t count = add_segment(c, local, out, 0, iova, size, rights);
    if (count < 0)
        return -DATA_TRANSFER;
    int64_t left = length - size;
    if (left == 0)
        return count;
    if (left <= PAGE) {
        if (sqe->prp2 & (PAGE - 1))
            return -PRP_OFFSET;
        count = add_segment(c, local, out, count, sqe->prp2, left, rights);
        return count >= 0 ? count : -DATA_TRANSFER;
    }
    int64_t at = sqe->prp2;
    if (at & 7)
        return -PRP_OFFSET;
    int64_t entries = (PAGE - (at & (PAGE - 1))) >> 3, index = 0;
    int64_t page = dma_find(c, local, at, entries * 8, DMA_READ);
    if (page == 0)
        return -DATA_TRANSFER;
    while (left > 0) {
        int64_t entry = load64(page + 8 * index++);
        if (entry & (PAGE - 1))
            return -PRP_OFFSET;
        if (index == entries && left > PAGE) {
            entries = PAGE >> 3;
            index = 0;
            page = dma_find(c, local, entry, PAGE, DMA_READ);
            if (page == 0)
                return -DATA_TRANSFER;
            continue;
        }
        size = left < PAGE ? left : PAGE;
        count = add_segment(c, local, out, count, entry, size, rights);
        if (count < 0)
            return -DATA_TRANSFER;
        left -= size;
    }
    return count;
}

static void count_ticks(int64_t *sum, int64_t *longest, int64_t *shortest, int64_t spent)
{
    *sum += spent;
    if (spent > *longest)
        *longest = spent;
    if (spent < *shortest || *shortest == 0)
        *shortest = spent;
}

static void count_command(const struct POLLER *p, const struct CONTROLLER *c, const struct INFLIGHT *entry,
                          struct SQ *sq, int64_t status)
{
    int64_t op = entry->sqe.opcode, nsid = entry->sqe.nsid, spent = 0;
    if (p->stamps) {
        int64_t now = (int64_t)__rdtsc();
        sq->ticks_wait += entry->begun - entry->seen;
        sq->ticks_serve += now - entry->begun;
        spent = now - entry->seen > 0 ? now - entry->seen : 0;
        spent = spent < (int64_t)1 << 40 ? spent : (int64_t)1 << 40;
    }
    sq->commands++;
    if (status)
        sq->errors++;
    if (entry->sqid && 0 < nsid && nsid <= NAMESPACES) {
        struct SPACE *space = &AT(SPACE, c->state + SPACE_OFFSET)[nsid - 1];
        if (status) {
            space->errors++;
            if ((status >> 8 & 7) == 2)
                space->media_errors++;
        } else if (op == OP_READ) {
            space->reads++;
            space->bytes_read += entry->bytes;
            count_ticks(&space->read_ticks, &space->read_ticks_max, &space->read_ticks_min, spent);
            sq->bytes_read += entry->bytes;
        } else if (op == OP_WRITE) {
            space->writes++;
            space->bytes_written += entry->bytes;
            count_ticks(&space->write_ticks, &space->write_ticks_max, &space->write_ticks_min, spent);
            sq->bytes_written += entry->bytes;
        } else {
            space->others++;
        }
    }
    if (p->stamps) {
        int64_t ns = spent * p->ns_mult >> 20;
        int64_t bucket = ns;
        if (ns >= 1 << HISTOGRAM_STEP_BITS) {
            int exponent = 63 - __builtin_clzll((uint64_t)ns) - HISTOGRAM_STEP_BITS;
            bucket = ((int64_t)exponent << HISTOGRAM_STEP_BITS) + (ns >> exponent);
        }
        if (bucket > HISTOGRAM_BUCKETS - 1)
            bucket = HISTOGRAM_BUCKETS - 1;
        int64_t at = c->state + HISTOGRAM_OFFSET + 8 * (HISTOGRAM_BUCKETS * entry->sqid + bucket);
        store64((int64_t *)at, load64(at) + 1);
    }
}

static int64_t transfer(const struct CONTROLLER *c, int64_t slot, struct INFLIGHT *entry, struct QUEUE_LOCAL *local,
                        const struct NAMESPACE *ns, int64_t lba, int64_t blocks)
{
    int64_t op = entry->sqe.opcode, length = blocks << ns->shift;
    if (length > TRANSFER_MAX)
        return INVALID_FIELD;
    entry->bytes = length;
    struct SEGMENT *segments = AT(SEGMENT, c->segments + slot * SEGMENT_LIST_BYTES);
    int64_t count = walk_prps(c, local, &entry->sqe, length, op == OP_READ ? DMA_WRITE : DMA_READ, segments);
    if (count < 0)
        return -count;
    if (ns->kind == KIND_NULL)
        return 0;
    if (ns->kind != KIND_MEMORY)
        abort();
    char *host = (char *)(ns->host + (lba << ns->shift));
    for (int64_t i = 0; i < count; i++) {
        size_t size = (size_t)segments[i].length;
        if (op == OP_READ)
            memcpy((void *)segments[i].host, host, size);
        else if (op == OP_WRITE)
            memcpy(host, (void *)segments[i].host, size);
        else if (memcmp(host, (void *)segments[i].host, size))
            return COMPARE_FAILURE;
        host += size;
    }
    return 0;
}

static int64_t execute(const struct CONTROLLER *c, int64_t slot, struct INFLIGHT *entry, struct QUEUE_LOCAL *local)
{
    const struct SQE *sqe = &entry->sqe;
    if (entry->sqid == 0)
        abort();
    if (sqe->cdw0_flags)
        return INVALID_FIELD;
    int64_t op = sqe->opcode, nsid = sqe->nsid;
    if (op != OP_READ && op != OP_WRITE && op != OP_FLUSH && op != OP_COMPARE && op != OP_ZEROES && op != OP_DSM)
        return INVALID_OPCODE;
    if (op == OP_FLUSH || op == OP_DSM || op == OP_ZEROES)
        abort();
    if (nsid < 1 || nsid > c->namespaces_max)
        return INVALID_NAMESPACE;
    const struct NAMESPACE *ns = &AT(NAMESPACE, c->namespaces)[nsid - 1];
    if (ns->kind == KIND_ABSENT)
        return INVALID_FIELD;
    if (ns->kind == KIND_FILE)
        abort();
    int64_t lba = (int64_t)((uint64_t)sqe->cdw10 | (uint64_t)sqe->cdw11 << 32);
    int64_t blocks = (sqe->cdw12 & 0xFFFF) + 1;
    if (lba < 0 || lba > ns->blocks || blocks > ns->blocks - lba)
        return LBA_RANGE;
    if (ns->readonly && op == OP_WRITE)
        return WRITE_PROTECTED;
    return transfer(c, slot, entry, local, ns, lba, blocks);
}

static void post(struct POLLER *p, struct CONTROLLER *c, int64_t slot, struct INFLIGHT *entry, struct SQ *sq,
                 struct QUEUE_LOCAL *sl, struct CQ *cq, struct QUEUE_LOCAL *cl, int64_t status)
{
    if (status)
        abort(); /* the benchmark's commands succeed */
    if (p->counters)
        count_command(p, c, entry, sq, status);
    entry->status = status;
    entry->cq_count = cq->posted;
    entry->cqe_low = entry->dw0;
    uint64_t high = (uint64_t)sl->sq_head | (uint64_t)entry->sqid << 16 | (uint64_t)entry->sqe.cid << 32;
    entry->cqe_high = (int64_t)(high | (uint64_t)(status << 1 | cl->cq_phase) << 48);
    store64(&entry->state, POSTING);
    cl->cq_outstanding--;
    int64_t *cqe = (int64_t *)(cl->cq_host + 16 * cl->cq_tail);
    store64(cqe, entry->cqe_low);
    store64(cqe + 1, entry->cqe_high);
    store64(&cq->posted, cq->posted + 1);
    if (++cl->cq_tail == cq->entries) {
        cl->cq_tail = 0;
        cl->cq_phase ^= 1;
    }
    store64(&entry->state, FREE);
    sl->sq_outstanding--;
    store64((int64_t *)c->free + c->free_count++, slot);
    if (cl->dirty == 0) {
        cl->dirty = 1;
        store64((int64_t *)p->dirty + p->dirty_count++, c->index << 32 | sq->cqid);
    }
}

static int64_t serve_queue(struct POLLER *p, struct CONTROLLER *c, int64_t sqid)
{
    struct SQ *sq = &AT(SQ, c->state + SQ_OFFSET)[sqid];
    struct QUEUE_LOCAL *locals = AT(QUEUE_LOCAL, c->queues), *sl = &locals[sqid], *cl = &locals[sq->cqid];
    struct CQ *cq = &AT(CQ, c->state + CQ_OFFSET)[sq->cqid];
    int64_t tail = load32((c->shadow && sqid ? c->shadow : c->bar) + 8 * sqid), head = sl->sq_head;
    if (tail == head || tail >= sq->entries)
        return 0;
    if (sl->sq_host == 0)
        sl->sq_host = dma_find(c, sl, sq->iova, sq->entries * 64, DMA_READ);
    if (cl->cq_host == 0)
        cl->cq_host = dma_find(c, cl, cq->iova, cq->entries * 16, DMA_WRITE);
    if (sl->sq_host == 0 || cl->cq_host == 0)
        return 0;
    int64_t consumed = load32((c->shadow && sq->cqid ? c->shadow : c->bar) + 8 * sq->cqid + 4);
    if (consumed >= cq->entries)
        return 0;
    int64_t unread = cl->cq_tail - consumed;
    if (unread < 0)
        unread += cq->entries;
    const struct URING *u = AT(URING, p->uring);
    int64_t seen = p->stamps ? (int64_t)__rdtsc() : 0, fetched = 0;
    struct INFLIGHT *table = AT(INFLIGHT, c->state + INFLIGHT_OFFSET);
    while (head != tail && fetched < BATCH) {
        if (c->free_count == 0 || u->inflight + 257 > u->limit)
            break;
        if (unread + cl->cq_outstanding >= cq->entries - 1)
            abort(); /* the client's queues have room */
        int64_t slot = load64(c->free + 8 * --c->free_count);
        struct INFLIGHT *entry = &table[slot];
        memcpy(&entry->sqe, (void *)(sl->sq_host + 64 * head), sizeof entry->sqe);
        entry->sqid = sqid;
        entry->sq_count = sq->fetched;
        entry->sequence = c->sequence;
        entry->status = 0;
        entry->dw0 = 0;
        entry->bytes = 0;
        entry->verdict = 0;
        entry->seen = seen;
        entry->where = WHERE_ASIC;
        store64(&entry->state, FETCHED);
        store64(&sq->fetched, sq->fetched + 1);
        c->sequence++;
        if (++head == sq->entries)
            head = 0;
        sl->sq_head = head;
        sl->sq_outstanding++;
        cl->cq_outstanding++;
        fetched++;
        if (p->stamps)
            entry->begun = (int64_t)__rdtsc();
        post(p, c, slot, entry, sq, sl, cq, cl, execute(c, slot, entry, sl));
        unread++;
    }
    if (c->events && sqid && !p->armed)
        store32(c->events + 8 * sqid, (uint32_t)((head ? head : sq->entries) - 1));
    return fetched;
}

static void signal_guests(struct POLLER *p)
{
    struct CONTROLLER *controllers = AT(CONTROLLER, p->controllers);
    for (int64_t i = 0; i < p->dirty_count; i++) {
        int64_t value = load64(p->dirty + 8 * i), cqid = value & 0xFFFFFFFF;
        struct CONTROLLER *c = &controllers[value >> 32];
        struct CQ *cq = &AT(CQ, c->state + CQ_OFFSET)[cqid];
        AT(QUEUE_LOCAL, c->queues)[cqid].dirty = 0;
        int64_t fd = cq->interrupts ? load64(c->vectors + 8 * cq->vector) : -1;
        if (fd >= 0) {
            if (write((int)fd, (void *)(p->scratch + 2 * PAGE), 8) < 0)
                abort();
            cq->signals++;
        }
    }
    p->dirty_count = 0;
}

int64_t baseline_pass(int64_t address)
{
    struct POLLER *p = AT(POLLER, address);
    if (load64(p->updates + RING_HEAD) != load64(p->updates + RING_TAIL) || AT(URING, p->uring)->inflight)
        abort();
    int64_t work = 0;
    for (int64_t i = 0; i < p->controller_count; i++) {
        struct CONTROLLER *c = &AT(CONTROLLER, p->controllers)[i];
        if (!c->live || c->hold)
            continue;
        if (c->todo_begin != c->todo_end)
            abort();
        for (int64_t k = 0; k < c->live_count; k++)
            work += serve_queue(p, c, load64(c->live_queues + 8 * k));
    }
    if (AT(URING, p->uring)->pending)
        abort();
    signal_guests(p);
    if (p->kick)
        abort();
    return work;
}

int64_t empty_pass(int64_t address) { return address == 0; }

/* The guest's side, the same for both: keeps every queue at its depth and times each pass. */

struct client_queue {
    int64_t sq, cq, doorbells, prp1, prp2; /* addresses; prp1 and prp2 are arrays by CID */
    int64_t qid, entries, tail, head, phase, outstanding, opcode, nsid, blocks, places, random;
};

typedef int64_t pass(int64_t poller);

/* Runs until ``total`` commands have completed; the ticks of every pass go to ``spans``. How many passes, or -1. */
int64_t drive(pass *f, int64_t poller, struct client_queue *queues, int64_t count, int64_t depth, int64_t total,
              uint32_t *spans)
{
    int64_t completed = 0, passes = 0;
    while (completed < total) {
        for (int64_t i = 0; i < count; i++) {
            struct client_queue *q = &queues[i];
            while (q->outstanding < depth) {
                q->random ^= q->random << 13;
                q->random ^= (int64_t)((uint64_t)q->random >> 7);
                q->random ^= q->random << 17;
                int64_t cid = q->tail % depth; /* closed loop, in order: this one is free again */
                int64_t lba = (int64_t)((uint64_t)q->random % (uint64_t)q->places) * q->blocks;
                int64_t *e = (int64_t *)(q->sq + 64 * q->tail);
                e[0] = q->opcode | cid << 16 | q->nsid << 32;
                e[1] = e[2] = 0;
                e[3] = ((int64_t *)q->prp1)[cid];
                e[4] = ((int64_t *)q->prp2)[cid];
                e[5] = lba;
                e[6] = q->blocks - 1;
                e[7] = 0;
                q->tail = q->tail + 1 < q->entries ? q->tail + 1 : 0;
                q->outstanding++;
            }
            store32(q->doorbells + 8 * q->qid, (uint32_t)q->tail);
        }
        unsigned aux;
        _mm_lfence();
        uint64_t begin = __rdtsc();
        int64_t work = f(poller);
        uint64_t end = __rdtscp(&aux);
        _mm_lfence();
        spans[passes++] = (uint32_t)(end - begin);
        if (f == empty_pass) {
            if (passes >= total)
                return passes;
            continue;
        }
        if (work == 0)
            return -1;
        for (int64_t i = 0; i < count; i++) {
            struct client_queue *q = &queues[i];
            for (;;) {
                uint32_t last = load32(q->cq + 16 * q->head + 12);
                if ((last >> 16 & 1) != q->phase)
                    break;
                if (last >> 17)
                    return -1;
                completed++;
                q->outstanding--;
                if (++q->head == q->entries) {
                    q->head = 0;
                    q->phase ^= 1;
                }
            }
            store32(q->doorbells + 8 * q->qid + 4, (uint32_t)q->head);
        }
    }
    /* what is still in flight is finished outside the measurement */
    for (int64_t left = 1; left;) {
        left = 0;
        for (int64_t i = 0; i < count; i++)
            left += queues[i].outstanding;
        if (left && f(poller) == 0)
            return -1;
        for (int64_t i = 0; i < count; i++) {
            struct client_queue *q = &queues[i];
            while ((load32(q->cq + 16 * q->head + 12) >> 16 & 1) == q->phase) {
                q->outstanding--;
                if (++q->head == q->entries) {
                    q->head = 0;
                    q->phase ^= 1;
                }
            }
            store32(q->doorbells + 8 * q->qid + 4, (uint32_t)q->head);
        }
    }
    return passes;
}
