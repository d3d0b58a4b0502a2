/* SPDX-License-Identifier: GPL-2.0 */
/* Input of bindgen for src/bindings.rs. src/bindings.parameters selects the declarations. */
#include <rdma/ib_verbs.h>
#include <rdma/ib_cache.h>
#include <crypto/sha2.h>
#include <crypto/utils.h>
#include <linux/cgroup.h>
#include <linux/completion.h>
#include <linux/cpumask.h>
#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/highmem.h>
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/nsproxy.h>
#include <linux/preempt.h>
#include <linux/rtmutex.h>
#include <linux/scatterlist.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/sched/user.h>
#include <linux/uio.h>
#include <linux/user_namespace.h>
#include <linux/vmalloc.h>

#include <kite.h>
#include <mlx5.h>
#include <wc_status.h>

/* Wrappers of macros, for which bindgen generates no bindings. */
static inline struct page *kite_virt_to_page(const void *addr)
{
	return virt_to_page(addr);
}

static inline void *kite_page_address(const struct page *page)
{
	return page_address(page);
}

/* Returns true if the RDMA subsystem lets the current process use @device: see rdma-system(8). */
static inline bool kite_device_accessible(struct ib_device *device)
{
	return rdma_dev_access_netns(device, current->nsproxy->net_ns);
}

/*
 * Returns true if the memory mapped at @addr needs explicit synchronization: the device
 * accesses a bounce buffer (swiotlb), or is not coherent with the CPU caches.
 */
static inline bool kite_dma_needs_sync(struct ib_device *device, dma_addr_t addr)
{
	return !ib_uses_virt_dma(device) && dma_need_sync(device->dma_device, addr);
}

/*
 * Charges pages to be pinned to @mm, as ib_umem_get() does. account_locked_vm() would take the
 * mmap lock for each transfer. Returns -ENOMEM if RLIMIT_MEMLOCK would be exceeded.
 */
static inline int kite_account_pinned(struct mm_struct *mm, unsigned long pages)
{
	u64 limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;

	if (atomic64_add_return(pages, &mm->pinned_vm) <= limit || capable(CAP_IPC_LOCK))
		return 0;
	atomic64_sub(pages, &mm->pinned_vm);
	return -ENOMEM;
}

static inline void kite_unaccount_pinned(struct mm_struct *mm, unsigned long pages)
{
	atomic64_sub(pages, &mm->pinned_vm);
}

/*
 * Charges pages to be pinned long-term to the current user, for all processes of the user
 * together: long-term pins can outlive their process. Returns the user with a reference, NULL if
 * CAP_IPC_LOCK lifts the limit, or ERR_PTR(-ENOMEM) if RLIMIT_MEMLOCK would be exceeded.
 */
static inline struct user_struct *kite_account_long(unsigned long pages)
{
	unsigned long limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;
	struct user_struct *user;

	if (capable(CAP_IPC_LOCK))
		return NULL;
	user = get_uid(current_user());
	if (atomic_long_add_return(pages, &user->locked_vm) <= limit)
		return user;
	atomic_long_sub(pages, &user->locked_vm);
	free_uid(user);
	return ERR_PTR(-ENOMEM);
}

static inline void kite_unaccount_long(struct user_struct *user, unsigned long pages)
{
	if (!user)
		return;
	atomic_long_sub(pages, &user->locked_vm);
	free_uid(user);
}

/*
 * Returns true if the scheduler requests a reschedule of the current task, also if lazily. With
 * lazy preemption the reschedule happens at the return to user space, which a task that polls in
 * the kernel delays.
 */
static inline bool kite_should_yield(void)
{
	return tif_need_resched() || test_thread_flag(TIF_NEED_RESCHED_LAZY);
}

/*
 * Locks @lock. The holder of an rt_mutex inherits no priority from waiters of SCHED_NORMAL, so a
 * kernel thread waits under SCHED_FIFO. A thread that was real-time before the wait keeps its
 * policy.
 */
static inline void kite_pi_mutex_lock(struct rt_mutex *lock)
{
	int nice = task_nice(current);

	might_sleep();
	/* lockdep learns no order from a trylock. */
	might_lock(lock);
	if (rt_mutex_trylock(lock))
		return;
	if (!(current->flags & PF_KTHREAD) || current->policy != SCHED_NORMAL)
		return rt_mutex_lock(lock);
	sched_set_fifo_low(current);
	rt_mutex_lock(lock);
	sched_set_normal(current, nice);
}

static inline void kite_assert_pi_mutex_held(struct rt_mutex *lock)
{
	lockdep_assert_held(lock);
}

/*
 * Returns the number of online CPUs with lower IDs than the current CPU. Only a hint, since the
 * task may move to another CPU.
 */
static inline unsigned int kite_cpu_rank(void)
{
	return bitmap_weight(cpumask_bits(cpu_online_mask), raw_smp_processor_id());
}

/* With PREEMPT_RT a spinlock sleeps, so the caller may be preempted there. */
static inline void kite_preempt_disable(void)
{
	if (!IS_ENABLED(CONFIG_PREEMPT_RT))
		preempt_disable();
}

static inline void kite_preempt_enable(void)
{
	if (!IS_ENABLED(CONFIG_PREEMPT_RT))
		preempt_enable();
}

/*
 * Discards all pending wake-ups. Takes the lock of the wait queue, unlike reinit_completion(), so
 * a concurrent complete() is safe.
 */
static inline void kite_reinit_completion(struct completion *x)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&x->wait.lock, flags);
	x->done = 0;
	raw_spin_unlock_irqrestore(&x->wait.lock, flags);
}

/*
 * Like wait_for_completion_timeout(), with TASK_IDLE and a high-resolution timer instead of
 * jiffies. The timer may expire up to a quarter of @us late, so that the kernel can coalesce
 * timers.
 */
static inline void kite_wait_for_completion_us(struct completion *x, u32 us)
{
	ktime_t end = ktime_add_us(ktime_get(), us);
	u64 slack_ns = us * (NSEC_PER_USEC / 4);
	DECLARE_SWAITQUEUE(wait);
	bool done;

	do {
		prepare_to_swait_exclusive(&x->wait, &wait, TASK_IDLE);
		done = try_wait_for_completion(x);
	} while (!done && schedule_hrtimeout_range(&end, slack_ns, HRTIMER_MODE_ABS));
	finish_swait(&x->wait, &wait);
}

/* Returns the memory cgroup of the current process with a reference; NULL for a kernel thread. */
static inline struct mem_cgroup *kite_current_memcg(void)
{
	return current->mm ? get_mem_cgroup_from_mm(current->mm) : NULL;
}

static inline bool kite_is_wq_worker(void)
{
	return current->flags & PF_WQ_WORKER;
}

/*
 * Stores the IDs of the cgroups of the current process in @ids, from its own cgroup to the root,
 * at most @capacity. Returns the total number of cgroups, which can exceed @capacity.
 */
static inline u32 kite_current_cgroups(u64 *ids, u32 capacity)
{
	u32 count = 0;
#ifdef CONFIG_CGROUPS
	struct cgroup *cgroup;

	rcu_read_lock();
	for (cgroup = task_dfl_cgroup(current); cgroup; cgroup = cgroup_parent(cgroup)) {
		if (count < capacity)
			ids[count] = cgroup_id(cgroup);
		count++;
	}
	rcu_read_unlock();
#endif
	return count;
}

/*
 * Maps pages at DMA addresses @pages to an MR. Work requests access the @len bytes of the MR by
 * addresses that start at @addr, which is in the first page.
 */
static inline int kite_map_mr(struct ib_mr *mr, const u64 *pages, unsigned int count, u64 addr,
			      u64 len)
{
	struct scatterlist *list = kvmalloc_array(count, sizeof(*list), GFP_KERNEL);
	unsigned int i;
	int mapped;

	if (!list)
		return -ENOMEM;
	sg_init_table(list, count);
	for (i = 0; i < count; i++) {
		sg_dma_address(&list[i]) = pages[i];
		sg_dma_len(&list[i]) = PAGE_SIZE;
	}
	mapped = ib_map_mr_sg(mr, list, count, NULL, PAGE_SIZE);
	kvfree(list);
	if (mapped != count)
		return mapped < 0 ? mapped : -EINVAL;
	mr->iova = addr;
	mr->length = len;
	return 0;
}

/* bindgen does not evaluate _IOWR(), but reads the values of enumerators. */
enum kite_command {
	KITE_CMD_BIND = KITE_IOC_BIND,
	KITE_CMD_ALLOC = KITE_IOC_ALLOC,
	KITE_CMD_MAP = KITE_IOC_MAP,
	KITE_CMD_UNMAP = KITE_IOC_UNMAP,
	KITE_CMD_FREE = KITE_IOC_FREE,
	KITE_CMD_READ = KITE_IOC_READ,
	KITE_CMD_WRITE = KITE_IOC_WRITE,
	KITE_CMD_QUERY_REGION = KITE_IOC_QUERY_REGION,
	KITE_CMD_LIST_REGIONS = KITE_IOC_LIST_REGIONS,
	KITE_CMD_GET_EVENT = KITE_IOC_GET_EVENT,
	KITE_CMD_ATOMIC = KITE_IOC_ATOMIC,
	KITE_CMD_SERVE = KITE_IOC_SERVE,
	KITE_CMD_CALL = KITE_IOC_CALL,
	KITE_CMD_RECEIVE = KITE_IOC_RECEIVE,
	KITE_CMD_REPLY = KITE_IOC_REPLY,
	KITE_CMD_REPLY_RECEIVE = KITE_IOC_REPLY_RECEIVE,
	KITE_CMD_LOCK = KITE_IOC_LOCK,
	KITE_CMD_UNLOCK = KITE_IOC_UNLOCK,
	KITE_CMD_BARRIER = KITE_IOC_BARRIER,
	KITE_CMD_FILL = KITE_IOC_FILL,
	KITE_CMD_COPY = KITE_IOC_COPY,
	KITE_CMD_GRANT = KITE_IOC_GRANT,
	KITE_CMD_CREATE_QUEUE = KITE_IOC_CREATE_QUEUE,
	KITE_CMD_ENTER = KITE_IOC_ENTER,
	KITE_CMD_DESTROY_QUEUE = KITE_IOC_DESTROY_QUEUE,
	KITE_CMD_CANCEL = KITE_IOC_CANCEL,
	KITE_CMD_REGISTER = KITE_IOC_REGISTER,
	KITE_CMD_READV = KITE_IOC_READV,
	KITE_CMD_WRITEV = KITE_IOC_WRITEV,
	KITE_CMD_SET_PRIORITY = KITE_IOC_SET_PRIORITY,
	KITE_CMD_MIGRATE = KITE_IOC_MIGRATE,
	KITE_CMD_RENAME = KITE_IOC_RENAME,
	KITE_CMD_QOS = KITE_IOC_QOS,
	KITE_CMD_SET_LIMIT = KITE_IOC_SET_LIMIT,
	KITE_CMD_LIST_LIMITS = KITE_IOC_LIST_LIMITS,
	KITE_CMD_GET_PARAMETERS = KITE_IOC_GET_PARAMETERS,
	KITE_CMD_GET_VIEW = KITE_IOC_GET_VIEW,
	KITE_CMD_QUERY_RNIC = KITE_IOC_QUERY_RNIC,
	KITE_CMD_GET_STATS = KITE_IOC_GET_STATS,
	KITE_CMD_REG_MR = KITE_IOC_REG_MR,
	KITE_CMD_DEREG_MR = KITE_IOC_DEREG_MR,
	KITE_CMD_CONNECT = KITE_IOC_CONNECT,
	KITE_CMD_CLOSE_VQP = KITE_IOC_CLOSE_VQP,
	KITE_CMD_PUSH = KITE_IOC_PUSH,
	KITE_CMD_POP = KITE_IOC_POP,
	KITE_CMD_LISTEN = KITE_IOC_LISTEN,
	KITE_CMD_ACCEPT = KITE_IOC_ACCEPT,
	KITE_CMD_POP_MESSAGE = KITE_IOC_POP_MESSAGE,
	KITE_CMD_LIST_VQPS = KITE_IOC_LIST_VQPS,
	KITE_CMD_CLOSE_LISTENER = KITE_IOC_CLOSE_LISTENER,
	KITE_CMD_JOIN = KITE_IOC_JOIN,
	KITE_CMD_SET_VIEW = KITE_IOC_SET_VIEW,
	KITE_CMD_PROBE = KITE_IOC_PROBE,
};
