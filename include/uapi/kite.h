/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * The ABI of /dev/kite.
 *
 * An open file is a session. KITE_IOC_BIND binds the session to one RNIC and checks the ABI
 * version. Before that, all other requests but KITE_IOC_QUERY_RNIC and KITE_IOC_GET_PARAMETERS
 * return ENOTCONN. A session owns handles to memory regions (LMRs) and anonymous regions. Closing
 * the session releases them.
 *
 * Rules for all requests:
 *  - The request number encodes the size of the structure: another size is another request.
 *  - Members named reserved, and bits that are not defined, must be zero: EINVAL.
 *  - Pointers are __u64. A pointer that cannot be read or written: EFAULT.
 *  - A request of unknown number or size: ENOTTY.
 *  - Integers are in native byte order.
 *  - A request has the rights of the effective user of the caller. Root without CAP_SYS_ADMIN in
 *    the initial user namespace has those of user 65534.
 *  - UIDs are those of the caller's user namespace. A UID in a request that the namespace does not
 *    map: EINVAL. Users that the namespace does not map are returned as the overflow UID, which is
 *    65534 by default.
 *  - Results are written only on success. A prefix of an array may be written before an EFAULT.
 *  - Any request of a bound session may return ENODEV (the RNIC was removed) and ENOMEM.
 *
 * Meaning of each errno:
 *  EACCES           the user lacks a right, a right was revoked, the handle was mapped without
 *                   it, or another user owns the region
 *  EADDRINUSE       the port has a listener
 *  EAGAIN           no event, completion, call or message is available; the lock is held
 *  EBADF            the session has no such handle, call, lock, I/O queue, VQP or key
 *  EBUSY            the session is bound, the RNIC has a daemon, the handle is served, the region
 *                   is migrating or being renamed, or a maximum per session is reached
 *  ECANCELED        the process canceled the submission
 *  ECONNREFUSED     the region has no server, or the port no listener
 *  ECONNRESET       the server closed before it replied, or the other end of a VQP closed
 *  EEXIST           the name is in use
 *  EHOSTDOWN        a node that holds the region is unreachable, or not in the view. The region
 *                   of an unreachable node remains, and the handle can be used again once the
 *                   node is reachable
 *  EHOSTUNREACH     this node has no view: it is in no cluster
 *  EINTR            a signal ended a read or write, an unknown part of which was done; or the wait
 *                   for a call, a lock, a barrier or completions; or a request that connects,
 *                   accepts, pushes or pops. Fatal signals alone interrupt other requests
 *  EINVAL           a member has a value that this header does not allow
 *  EIO              the RNIC or the peer rejected the operation
 *  EMSGSIZE         longer than the maximum message, or than the receive buffer
 *  ENAMETOOLONG     a name without a terminating zero
 *  ENOBUFS          a VQP is full: pop completions
 *  ENODEV           no such RNIC, or the RNIC was removed
 *  ENOENT           no region of the name, RNIC of the index, memory of the key, or submission to
 *                   cancel
 *  ENOMEM           no memory at this node or another, or a limit of such memory is reached
 *  ENOSPC           the table of limits is full
 *  ENOTCONN         the session is not bound: KITE_IOC_BIND
 *  ENOTTY           unknown request
 *  ENXIO            the RNIC has no memory keys of the length, or no atomics on the memory of the
 *                   other node
 *  EOPNOTSUPP       the handle is not served, or the module of the node lacks the optional feature
 *                   of the request
 *  EOWNERDEAD       the lock was lost, since its home was unreachable
 *  EPERM            needs the daemon's session, or CAP_NET_ADMIN
 *  EPROTONOSUPPORT  the ABI version differs from that of the kernel
 *  ERANGE           offset and length exceed the region
 *  EREMOTE          the region belongs to another node
 *  ESTALE           the region was freed
 *  ETIMEDOUT        the deadline passed
 *
 * The ioctl magic is 0xBC, which the kernel's ioctl-number.rst lists as free.
 */
#ifndef _UAPI_KITE_H
#define _UAPI_KITE_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Incremented when an existing request changes its meaning. */
#define KITE_ABI_VERSION 3

/*
 * Flag of KITE_IOC_RECEIVE, KITE_IOC_REPLY_RECEIVE, KITE_IOC_ACCEPT, KITE_IOC_POP and
 * KITE_IOC_POP_MESSAGE: the request returns at once, with EAGAIN if there is nothing to return. In
 * all requests a @timeout_ms of 0 is the default of the module.
 */
#define KITE_NOWAIT 1

/* A longer @timeout_ms counts as this time: one hour. */
#define KITE_TIMEOUT_MAX_MS 3600000

#define KITE_DEVICE "/dev/kite"

/* Sizes of names, terminating zero included. */
#define KITE_NAME_SIZE 64
#define KITE_RNIC_NAME_SIZE 64

/* Maximum nodes of a striped region, and maximum members of a view. */
#define KITE_STRIPE_MAX 64
#define KITE_NODES_MAX 1024

/* Node numbers are 1 … KITE_NODE_MAX. 0 is this node. */
#define KITE_NODE_SELF 0
#define KITE_NODE_MAX 65535

/* Rights to a region. */
#define KITE_READ (1 << 0) /* read the memory */
#define KITE_WRITE (1 << 1) /* write the memory, call the servers */
#define KITE_MASTER (1 << 2) /* serve, free, migrate, rename, grant rights */
#define KITE_RIGHTS (KITE_READ | KITE_WRITE | KITE_MASTER)

/**
 * struct kite_bind - binds the session to an RNIC, once.
 * @version: in: KITE_ABI_VERSION.
 * @reserved: zero.
 * @rnic: in: name of an RNIC, or "" for the first RNIC with an active port, or else the first RNIC;
 *	out: name of the selected RNIC.
 *
 * After `rdma system set netns exclusive`, a process can bind to the RNICs of its network namespace
 * only. EBUSY (bound already), ENAMETOOLONG, ENODEV, EPROTONOSUPPORT. After EFAULT the session may
 * be bound, if @rnic could be read and not written.
 */
struct kite_bind {
	__u32 version;
	__u32 reserved;
	char rnic[KITE_RNIC_NAME_SIZE];
};

/**
 * struct kite_alloc - allocates a region and returns a handle with all rights.
 * @len: in: bytes, at least 1. The memory is zeroed.
 * @nodes: in: pointer to @node_count node numbers (__u32). Chunks are striped over the
 *	nodes in this order.
 * @node_count: in: 1 … KITE_STRIPE_MAX, or 0 for this node alone.
 * @other_rights: in: rights of users other than the owner (the caller's effective user) and
 *	root.
 * @name: in: name, unique in the cluster, or "" for an anonymous region, which is freed
 *	with the session.
 * @handle: out: the handle, never 0.
 *
 * A named region exists until a master frees it, or until this node leaves the cluster. The
 * deadline is 10 s, plus 4 s for each GiB, which is zeroed. EEXIST, EHOSTDOWN (a node is not in the
 * view), EHOSTUNREACH, EINVAL, ENAMETOOLONG, ENOMEM, ETIMEDOUT.
 */
struct kite_alloc {
	__u64 len;
	__u64 nodes;
	__u32 node_count;
	__u32 other_rights;
	char name[KITE_NAME_SIZE];
	__u64 handle;
};

/**
 * struct kite_register - registers memory of the process as a region, and returns a handle with all
 * rights.
 * @addr: in: page-aligned memory that the process may write.
 * @len: in: bytes, at least 1. The contents are kept.
 * @other_rights: in: as for struct kite_alloc.
 * @reserved: zero.
 * @name: in: as for struct kite_alloc.
 * @handle: out: the handle, never 0.
 *
 * The process may use the memory concurrently with users of the region. The pages stay pinned as
 * long as the region exists, and count against RLIMIT_MEMLOCK. A named region keeps the pages also
 * after the process unmaps them or exits. After a fork they belong to the parent. Contiguous pages,
 * such as huge pages, form larger chunks.
 * EEXIST, EFAULT, EHOSTDOWN, EHOSTUNREACH, EINTR, EINVAL (also if a page is mapped twice in the
 * range), ENAMETOOLONG, ENOMEM (also over RLIMIT_MEMLOCK), ETIMEDOUT.
 */
struct kite_register {
	__u64 addr;
	__u64 len;
	__u32 other_rights;
	__u32 reserved;
	char name[KITE_NAME_SIZE];
	__u64 handle;
};

/* Flag of struct kite_map: @owner must own the region. */
#define KITE_MAP_OWNER 1

/**
 * struct kite_map - opens a named region.
 * @name: in: name of the region, or "" to open the region @region of @home.
 * @region: in: ID of the region, as in struct kite_region_entry, if @name is "", else zero.
 * @handle: out: a new handle.
 * @len: out: length of the region in bytes.
 * @home: in: home of the region, or KITE_NODE_SELF, if @name is "", else zero.
 * @rights: in: rights of the handle, at least one.
 * @flags: in: 0 or KITE_MAP_OWNER.
 * @owner: in: UID of the owner with KITE_MAP_OWNER, else zero; out: UID of the owner.
 *
 * Any user may create a region of a free name. KITE_MAP_OWNER opens a region of a trusted user
 * only: the home reports the owner, and the request fails with EACCES if it is another user. A
 * region without a name cannot be opened by its ID: ENOENT.
 * EACCES, EHOSTDOWN (the home is not in the view), EHOSTUNREACH, EINVAL, ENAMETOOLONG, ENOENT,
 * ENOMEM, ETIMEDOUT.
 */
struct kite_map {
	char name[KITE_NAME_SIZE];
	__u64 region;
	__u64 handle;
	__u64 len;
	__u32 home;
	__u32 rights;
	__u32 flags;
	__u32 owner;
};

/**
 * struct kite_handle - argument of KITE_IOC_UNMAP and KITE_IOC_FREE.
 * @handle: in: the handle.
 *
 * KITE_IOC_UNMAP closes the handle. An anonymous region is freed with its last handle. EBADF.
 *
 * KITE_IOC_FREE needs KITE_MASTER. The request removes the name and closes the handle. Other
 * handles become stale: their users receive ESTALE, and KITE_EVENT_STALE. The request returns when
 * no node can access the memory any longer. Memory of an unreachable node is returned to it once
 * the node is reachable. After an error the handle stays open; after ETIMEDOUT it may be stale,
 * while the region is being freed. EACCES, EBADF, EHOSTDOWN, ESTALE, ETIMEDOUT.
 *
 * Numbers of handles are not reused in a session.
 */
struct kite_handle {
	__u64 handle;
};

/* Applies to all users without a grant of their own. */
#define KITE_GRANT_OTHERS 1

/* Maximum users with a grant of their own per region. */
#define KITE_GRANTS_MAX 1024

/**
 * struct kite_grant - changes the rights of a user to a region.
 * @handle: in: the handle, with KITE_MASTER.
 * @uid: in: the user, or zero with KITE_GRANT_OTHERS.
 * @rights: in: the new rights; 0 revokes all.
 * @flags: in: 0 or KITE_GRANT_OTHERS.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 *
 * Handles mapped with a right that their user loses are closed: their users receive EACCES, and
 * KITE_EVENT_STALE. On success these handles cause no further access, except RPCs that wait for
 * credits of a server's ring. The grant of a user cannot be removed, only changed. After EHOSTDOWN,
 * EHOSTUNREACH, EIO, ENODEV, ENOMEM, ESTALE and ETIMEDOUT the change may have been made, or may be
 * made later, and the handles may still be in use. EACCES, EBADF, EHOSTDOWN, EHOSTUNREACH, EINVAL
 * (@uid is root or the owner, which have all rights), EIO, ENOMEM (also for more than
 * KITE_GRANTS_MAX), ESTALE, ETIMEDOUT.
 */
struct kite_grant {
	__u64 handle;
	__u32 uid;
	__u32 rights;
	__u32 flags;
	__u32 timeout_ms;
};

/**
 * struct kite_migrate - moves the memory of a region to other nodes while the region is in use.
 * @handle: in: the handle, with KITE_MASTER.
 * @nodes: in: as for struct kite_alloc.
 * @node_count: in: as for struct kite_alloc.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 *
 * Handles stay valid, and no written data are lost. Accesses wait while their chunks (see struct
 * kite_query_region) move. The home of the region does not change. Chunks that are on the right
 * node already stay there. Memory of a process or a module (KITE_IOC_REGISTER) is released; data
 * that the process or module stores to the memory during the migration are lost.
 *
 * After an error a part of the chunks may have moved. Chunks that moved to a node that died are
 * lost. The migration continues until its deadline when the caller is killed, or receives no reply
 * from the home. EACCES, EBADF, EBUSY (a migration or rename is in progress), EHOSTDOWN,
 * EHOSTUNREACH, EINVAL, EIO, ENOMEM (also if a node has no contiguous memory of the chunk size),
 * ESTALE, ETIMEDOUT.
 */
struct kite_migrate {
	__u64 handle;
	__u64 nodes;
	__u32 node_count;
	__u32 timeout_ms;
};

/**
 * struct kite_rename - gives a named region another name while the region is in use.
 * @handle: in: the handle, with KITE_MASTER.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 * @name: in: the new name, unique in the cluster.
 *
 * Handles stay valid. A region in conflict (see struct kite_region_entry) has the new name alone
 * afterwards. On success the old name is free, or belongs to the other region of this name. The
 * region has the old or the new name at any time. After EHOSTDOWN, EHOSTUNREACH, EIO, ENODEV,
 * ENOMEM, ESTALE and ETIMEDOUT the region may have either name, or be renamed until the deadline.
 * After all other errors it has the old name. EACCES, EBADF, EBUSY (a migration or rename is in
 * progress), EEXIST (also if the region has this name), EHOSTDOWN, EHOSTUNREACH, EINVAL (also for
 * an anonymous region), EIO, ENAMETOOLONG, ENOMEM, EOPNOTSUPP (the home is another node without
 * KITE_FEATURE_RENAME), ESTALE, ETIMEDOUT.
 */
struct kite_rename {
	__u64 handle;
	__u32 timeout_ms;
	__u32 reserved;
	char name[KITE_NAME_SIZE];
};

/**
 * struct kite_rw - reads or writes a region, synchronously.
 * @handle: in: the handle, with KITE_READ or KITE_WRITE.
 * @offset: in: first byte in the region.
 * @addr: in: the user buffer.
 * @len: in: bytes; 0 checks the handle and offset only.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 *
 * On success all @len bytes were transferred, and a write is visible to any later read by any node.
 * After an error an unknown part was transferred. Bytes are transferred in no particular order, and
 * single bytes only are atomic. The deadline does not bound page faults of the buffer, for example
 * on a file whose file system does not respond. Long buffers are pinned during the transfer, and
 * count against RLIMIT_MEMLOCK. Where the limit is reached they are copied instead, which is
 * slower. EACCES, EBADF, EHOSTDOWN, EINTR, EIO, ENODEV, ENOMEM (no memory, or pages of the buffer
 * are reclaimed as fast as they are faulted in), ERANGE, ESTALE, ETIMEDOUT.
 */
struct kite_rw {
	__u64 handle;
	__u64 offset;
	__u64 addr;
	__u64 len;
	__u32 timeout_ms;
	__u32 reserved;
};

/* Maximum segments of a request. */
#define KITE_SEGMENTS_MAX 1024

/**
 * struct kite_segment - a range of a region and a buffer.
 * @offset: first byte in the region.
 * @addr: the user buffer.
 * @len: bytes.
 */
struct kite_segment {
	__u64 offset;
	__u64 addr;
	__u64 len;
};

/**
 * struct kite_rwv - reads or writes several ranges of a region, synchronously.
 * @handle: in: the handle, with KITE_READ or KITE_WRITE.
 * @segments: in: pointer to @count struct kite_segment.
 * @count: in: at most KITE_SEGMENTS_MAX; 0 checks the handle only.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 *
 * Like struct kite_rw for each segment, with several segments in flight. Fatal signals alone
 * interrupt the request. If a segment exceeds the region, none is transferred. Also EFAULT, and
 * EINVAL for too many segments or a total length that overflows.
 */
struct kite_rwv {
	__u64 handle;
	__u64 segments;
	__u32 count;
	__u32 timeout_ms;
};

/**
 * struct kite_fill - fills a range of a region with one byte value.
 * @handle: in: the handle, with KITE_WRITE.
 * @offset: in: first byte in the region.
 * @len: in: bytes; 0 checks the handle and offset only.
 * @byte: in: the value, at most 255.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 *
 * Executed by the nodes that hold the memory. As for a write, on success the data are visible to
 * any later read, and after an error an unknown part was filled. After EHOSTDOWN, EHOSTUNREACH,
 * EIO, ENODEV, ESTALE and ETIMEDOUT at most 256 KiB may be filled later. EACCES, EBADF, EHOSTDOWN,
 * EHOSTUNREACH, EINVAL, EIO, ENODEV, ENOMEM, ERANGE, ESTALE, ETIMEDOUT.
 */
struct kite_fill {
	__u64 handle;
	__u64 offset;
	__u64 len;
	__u32 byte;
	__u32 timeout_ms;
};

/**
 * struct kite_copy - copies between regions, or within one.
 * @from: in: handle of the source, with KITE_READ.
 * @from_offset: in: first byte of the source.
 * @to: in: handle of the destination, with KITE_WRITE; may be @from, or another handle of
 *	its region.
 * @to_offset: in: first byte of the destination.
 * @len: in: bytes; 0 checks the handles and offsets only.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 *
 * Ranges may overlap, as for memmove(). If one node holds both ranges, that node copies. If two
 * other nodes hold the ranges, the node of the source writes to the other. If this node holds one
 * of two ranges, the data pass through a buffer of this node. As for a write, on success the data
 * are visible to any later read, and after an error an unknown part was copied. After EHOSTDOWN,
 * EHOSTUNREACH, EIO, ENODEV, ESTALE and ETIMEDOUT at most 64 KiB may be copied later. EACCES,
 * EBADF, EHOSTDOWN, EHOSTUNREACH, EINVAL, EIO, ENODEV, ENOMEM, ERANGE, ESTALE, ETIMEDOUT.
 */
struct kite_copy {
	__u64 from;
	__u64 from_offset;
	__u64 to;
	__u64 to_offset;
	__u64 len;
	__u32 timeout_ms;
	__u32 reserved;
};

/* Atomic operations on eight bytes. */
#define KITE_ATOMIC_FETCH_ADD 1 /* adds @operand, modulo 2^64 */
#define KITE_ATOMIC_COMPARE_SWAP 2 /* stores @operand if the value equals @expected */
#define KITE_ATOMIC_SWAP 3 /* stores @operand */

/**
 * struct kite_atomic - executes an atomic operation on 8 bytes of a region.
 * @handle: in: the handle, with KITE_READ and KITE_WRITE.
 * @offset: in: first byte in the region, a multiple of 8.
 * @operand: in: operand of @operation.
 * @expected: in: for KITE_ATOMIC_COMPARE_SWAP, else zero.
 * @value: out: the value before the operation, in native byte order.
 * @operation: in: KITE_ATOMIC_*.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 *
 * Atomic operations of all nodes on the same bytes are serialized, and each is executed at most
 * once. They are not atomic with respect to concurrent reads and writes. After EHOSTDOWN,
 * EHOSTUNREACH, EIO, ENODEV, ESTALE and ETIMEDOUT the operation may have been executed, or may be
 * executed later. After EFAULT for @value it was executed. A write may store its bytes more than
 * once before it returns: a word that atomic operations modify, such as a lock, must be modified by
 * atomic operations only. EACCES, EBADF, EHOSTDOWN, EHOSTUNREACH, EINVAL, EIO, ENODEV, ENOMEM,
 * ERANGE, ESTALE, ETIMEDOUT.
 */
struct kite_atomic {
	__u64 handle;
	__u64 offset;
	__u64 operand;
	__u64 expected;
	__u64 value;
	__u32 operation;
	__u32 timeout_ms;
};

/*
 * Maximum data of a call, message or reply that are sent inline. Longer data are transferred
 * through a rendezvous buffer, a region of the caller's node that is kept for later calls of the
 * session.
 */
#define KITE_DATA_INLINE 8128

/* Maximum data of a call, message or reply, in bytes. */
#define KITE_DATA_MAX (1U << 30)

/* Maximum servers of a region. */
#define KITE_SERVERS_MAX 1024

/**
 * struct kite_serve - makes the session an RPC server of a region.
 * @handle: in: the handle, with KITE_MASTER, of a region whose home is this node.
 * @ring_size: in: bytes of the ring of each calling node, a power of two from 32 KiB to 4
 *	MiB, or 0 for 64 KiB. The value of the first server applies to all servers.
 * @data_max: in: maximum bytes of a call or message, KITE_DATA_INLINE to KITE_DATA_MAX, or
 *	0 for KITE_DATA_INLINE. The value of the first server applies to all servers. Longer
 *	calls fail with EMSGSIZE.
 *
 * Sessions that have mapped the region with KITE_WRITE can call its servers. A region can have
 * several servers, in threads and sessions. Each call is delivered to one server. Calling nodes are
 * served in turn. While calls are pending, poll() reports POLLIN to all servers. The session serves
 * until the handle or the session is closed. Calls that it has received then fail with ECONNRESET,
 * and after the last server all calls. The rings are charged to the first server until the last has
 * closed. The memory and the name of the region are not affected. EACCES, EBADF, EBUSY (the handle
 * serves, or the region has KITE_SERVERS_MAX servers), EHOSTDOWN, EHOSTUNREACH, EINVAL, ENOMEM,
 * EREMOTE, ESTALE.
 */
struct kite_serve {
	__u64 handle;
	__u32 ring_size;
	__u32 data_max;
};

/*
 * A message: no reply. The request returns when the message is at the server's node, or, with more
 * than KITE_DATA_INLINE bytes, when a server has received it.
 */
#define KITE_CALL_ONEWAY 1

/**
 * struct kite_call - calls a server of a region and waits for the reply, or sends a message.
 * @handle: in: the handle, with KITE_WRITE.
 * @addr: in: data of the call.
 * @len: in: bytes of the data, at most KITE_DATA_MAX.
 * @reply: in: buffer of the reply.
 * @reply_len: in: bytes of the buffer, which bounds the reply; out: bytes of the reply.
 *	More than KITE_DATA_INLINE reserve a rendezvous buffer of this size at this node.
 * @function: in: function number, passed to the server.
 * @flags: in: 0, or KITE_CALL_ONEWAY with a @reply_len of 0.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 *
 * A call is executed at most once. After ECONNRESET, EHOSTDOWN, EIO, ENODEV and ETIMEDOUT the call
 * may have been executed, or may be executed later. After EFAULT for the reply, or ENOMEM for a
 * long reply, it may have been executed. Messages of one thread are delivered in order. A message
 * of at most KITE_DATA_INLINE bytes is lost if the last server closes before one receives it.
 * EACCES, EBADF, ECONNREFUSED, ECONNRESET, EHOSTDOWN, EHOSTUNREACH, EINVAL, EIO, EMSGSIZE, ENODEV,
 * ENOMEM, ESTALE, ETIMEDOUT (also while the server's ring is full).
 */
struct kite_call {
	__u64 handle;
	__u64 addr;
	__u64 len;
	__u64 reply;
	__u64 reply_len;
	__u32 function;
	__u32 flags;
	__u32 timeout_ms;
	__u32 reserved;
};

/**
 * struct kite_receive - waits for a call or message.
 * @handle: in: the handle passed to KITE_IOC_SERVE.
 * @addr: in: buffer of the data.
 * @len: in: bytes of the buffer; out: bytes of data.
 * @call: out: number for KITE_IOC_REPLY, or 0 for a message.
 * @function: out: function number of the caller.
 * @node: out: node of the caller.
 * @uid: out: effective user of the caller.
 * @flags: in: 0 or KITE_NOWAIT: EAGAIN if no call is pending, possibly also after POLLIN.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 *
 * After EMSGSIZE the call stays pending for a receive with a larger buffer. @data_max of struct
 * kite_serve bounds the length. Data of more than KITE_DATA_INLINE bytes are read from the caller's
 * node. That read may exceed the deadline, also with KITE_NOWAIT, and the buffer counts
 * against RLIMIT_MEMLOCK meanwhile. If the session closes before it replies, the caller receives
 * ECONNRESET. EACCES, EAGAIN, EBADF, EHOSTDOWN, EINTR, EINVAL, EMSGSIZE, ENOMEM, EOPNOTSUPP,
 * ESTALE, ETIMEDOUT.
 */
struct kite_receive {
	__u64 handle;
	__u64 addr;
	__u64 len;
	__u64 call;
	__u32 function;
	__u32 node;
	__u32 uid;
	__u32 flags;
	__u32 timeout_ms;
	__u32 reserved;
};

/* Ends the call without a reply: the caller receives ECONNRESET. */
#define KITE_REPLY_ABORT 1

/**
 * struct kite_reply - replies to a call.
 * @call: in: number of the call.
 * @addr: in: data of the reply.
 * @len: in: bytes of the data, at most KITE_DATA_MAX and @reply_len of the caller.
 * @flags: in: 0, or KITE_REPLY_ABORT with a @len of 0.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 *
 * After EFAULT, EINVAL, EMSGSIZE and ENOMEM the call is still open; after any other error it is
 * closed. A caller that has stopped waiting, or whose node has died, is no error. EBADF (also while
 * another thread replies), EHOSTUNREACH, EINVAL, EIO, EMSGSIZE, ETIMEDOUT.
 */
struct kite_reply {
	__u64 call;
	__u64 addr;
	__u64 len;
	__u32 flags;
	__u32 timeout_ms;
};

/**
 * struct kite_reply_receive - replies to a call and waits for the next call, in one request.
 * @reply: in: the reply, or a @call of 0 for none; out: @call is 0.
 * @receive: in, out: see struct kite_receive.
 *
 * KITE_IOC_REPLY, followed on success by KITE_IOC_RECEIVE. After EINTR the reply was sent. After
 * any other error the reply was sent if KITE_IOC_REPLY now returns EBADF.
 */
struct kite_reply_receive {
	struct kite_reply reply;
	struct kite_receive receive;
};

/* Flags of KITE_IOC_LOCK. */
#define KITE_LOCK_SHARED 1 /* shared; needs KITE_READ instead of KITE_WRITE */
#define KITE_LOCK_TRY 2 /* does not wait: EAGAIN if the lock has an owner or waiters */

/* Releases the lock as if the owner had died: the next owner gets @owner_died. */
#define KITE_UNLOCK_OWNER_DIED 1

/*
 * Maximum lock owners, lock waiters and barriers per region. Locks whose owner died count until
 * their next acquisition, and barriers from their first use on.
 */
#define KITE_WAITERS_MAX 65536

/**
 * struct kite_lock - acquires a lock of a region.
 * @handle: in: the handle, with KITE_WRITE, or with KITE_READ for a shared lock.
 * @number: in: number of the lock. A region has a lock for each number. Locks take no
 *	memory of the region.
 * @lock: out: argument of KITE_IOC_UNLOCK, never 0.
 * @flags: in: KITE_LOCK_*.
 * @owner_died: out: 1 if an owner died or closed its handle without unlocking, and no
 *	exclusive owner that received 1 has unlocked since. Else 0.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 *
 * Locks are advisory. Waiters are granted the lock in FIFO order of their arrival at the home. The
 * owner sees all writes of earlier owners. KITE_IOC_UNLOCK, or closing the handle, releases the
 * lock. The lock of a node that is removed or unreachable is released when all reachable members
 * have fenced the node. All locks end when the home dies. EACCES, EAGAIN, EBADF, EHOSTDOWN,
 * EHOSTUNREACH, EINTR, EINVAL, EIO, ENOMEM (also for more than KITE_WAITERS_MAX), ESTALE,
 * ETIMEDOUT.
 */
struct kite_lock {
	__u64 handle;
	__u64 number;
	__u64 lock;
	__u32 flags;
	__u32 owner_died;
	__u32 timeout_ms;
	__u32 reserved;
};

/**
 * struct kite_unlock - releases a lock.
 * @lock: in: as returned by KITE_IOC_LOCK.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @flags: in: 0 or KITE_UNLOCK_OWNER_DIED.
 *
 * The lock is granted to the next waiter when no write of the handle can land later. If that wait,
 * or the reply of the home, exceeds the deadline, the release continues in the background. EBADF,
 * EINVAL; EACCES, EHOSTDOWN and ESTALE: the lock ended earlier, with the rights, the home, this
 * node's membership or the region. EOWNERDEAD: the home and this node could not reach each other
 * since KITE_IOC_LOCK. The home has released the lock as if its owner had died, so another owner
 * may have changed what the lock protects.
 */
struct kite_unlock {
	__u64 lock;
	__u32 timeout_ms;
	__u32 flags;
};

/**
 * struct kite_barrier - waits at a barrier of a region until @count participants have arrived.
 * @handle: in: the handle, with KITE_WRITE.
 * @number: in: number of the barrier. A region has a barrier for each number, independent
 *	of its locks.
 * @generation: out: number of completed rounds, this one included.
 * @count: in: number of participants, at least 1. EINVAL if it differs from that of current
 *	waiters.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 *
 * After an error the caller does not count as arrived. After EFAULT, EINTR, EIO and ETIMEDOUT the
 * barrier may nevertheless have been released; the next generation of the caller is then higher by
 * two. If the home does not reply for half a second, the caller may count as waiting until it does.
 * EACCES, EBADF, EHOSTDOWN, EHOSTUNREACH, EINTR, EINVAL, EIO, ENOMEM (also if the region has
 * KITE_WAITERS_MAX), ESTALE, ETIMEDOUT.
 */
struct kite_barrier {
	__u64 handle;
	__u64 number;
	__u64 generation;
	__u32 count;
	__u32 timeout_ms;
};

/* Maximum entries of an I/O queue, and maximum bytes of its buffer. */
#define KITE_QUEUE_ENTRIES_MAX 1024
#define KITE_QUEUE_MEMORY_MAX (1 << 30)

/* Version of the layout of the mapping, the SQEs and the CQEs. */
#define KITE_QUEUE_VERSION 1

/* The kernel does not poll the submission queue: KITE_IOC_ENTER resumes it. */
#define KITE_QUEUE_NEED_WAKEUP 1

/**
 * struct kite_ring_header - start of the mapping of an I/O queue; each index has a cache line.
 * @sq_head: written by the kernel: SQEs consumed.
 * @sq_tail: written by the process: SQEs produced.
 * @cq_head: written by the process: CQEs consumed.
 * @cq_tail: written by the kernel: CQEs produced.
 * @flags: written by the kernel: KITE_QUEUE_NEED_WAKEUP.
 * @version: written by the kernel, once: KITE_QUEUE_VERSION.
 *
 * Indices are free-running modulo 2^32. Entry n is at index n modulo the number of entries. The
 * producer stores entries before the tail (release). The consumer loads them after the tail
 * (acquire).
 */
struct kite_ring_header {
	__u32 sq_head;
	__u32 reserved1[15];
	__u32 sq_tail;
	__u32 reserved2[15];
	__u32 cq_head;
	__u32 reserved3[15];
	__u32 cq_tail;
	__u32 reserved4[15];
	__u32 flags;
	__u32 reserved5[15];
	__u32 version;
	__u32 reserved6[15];
};

/* Offset of the SQEs in the mapping of an I/O queue. The CQEs follow the SQEs. */
#define KITE_QUEUE_SQ_OFFSET 4096

/**
 * struct kite_sqe - submission queue entry.
 * @tag: copied to the completion.
 * @request: KITE_IOC_READ, WRITE, FILL, COPY, ATOMIC, CALL, RECEIVE, REPLY, UNLOCK or PUSH.
 * @reserved: zero.
 * @body: the structure of the request, from its first byte on; the rest is ignored. Results
 *	are in the completion. Pointers are addresses in the buffer of the I/O queue.
 *
 * Requests may start and complete in any order. To order two requests, wait for the completion of
 * the first. Until a request completes, the RNIC may read the source of a write more than once, and
 * write the destination of a read. A read that fails may have modified its destination.
 *
 * If a KITE_IOC_REPLY fails or is canceled, the call is closed, and its caller receives ECONNRESET.
 *
 * KITE_IOC_RECEIVE: the flags must be zero. The kernel stores struct kite_recv_header at @addr,
 * followed by the data, for which @len bytes are available.
 *
 * KITE_IOC_PUSH: the body is one struct kite_send_wr, whose @tag is the number of the VQP. Its
 * memory is that of its keys, not the buffer of the I/O queue. Work requests to one VQP are pushed
 * in order, each on its own: a rejected request completes at once and does not affect later ones.
 * While KITE_VQP_DEPTH work requests are pending the next one waits; ENOBUFS if all of them are
 * completed and not popped. A work request that the priority and limits of the session delay beyond
 * the default deadline completes with ETIMEDOUT. Pushed work requests complete here, in order, with
 * or without KITE_WR_FLAG_SIGNALED, and are not popped.
 */
struct kite_sqe {
	__u64 tag;
	__u32 request;
	__u32 reserved;
	__u64 body[7];
};

/**
 * struct kite_cqe - completion queue entry.
 * @tag: of the submission.
 * @value: KITE_IOC_ATOMIC: the previous value; KITE_IOC_CALL: bytes of the reply;
 *	KITE_IOC_RECEIVE: bytes of the data; else zero.
 * @error: zero or the errno of the request; KITE_IOC_PUSH: also those of KITE_IOC_POP.
 *	ENOTTY: an I/O queue does not accept the request.
 * @reserved: zero.
 */
struct kite_cqe {
	__u64 tag;
	__u64 value;
	__u32 error;
	__u32 reserved;
};

/**
 * struct kite_recv_header - header of the data of a KITE_IOC_RECEIVE by an I/O queue.
 * @call: number for KITE_IOC_REPLY, or 0 for a message.
 * @len: bytes of data, which follow the header.
 * @function: function number of the caller.
 * @node: node of the caller.
 * @uid: effective user of the caller.
 * @reserved: zero.
 */
struct kite_recv_header {
	__u64 call;
	__u64 len;
	__u32 function;
	__u32 node;
	__u32 uid;
	__u32 reserved;
};

/* Maximum I/O queues of a session. */
#define KITE_QUEUES_MAX 16

/**
 * struct kite_create_queue - creates an I/O queue: a submission ring and a completion ring in
 * memory that the process and the kernel share.
 * @addr: in: buffer of the requests of the queue.
 * @len: in: bytes of the buffer, at most KITE_QUEUE_MEMORY_MAX.
 * @entries: in: entries of each ring, a power of two, at most KITE_QUEUE_ENTRIES_MAX.
 * @reserved: zero.
 * @queue: out: number of the I/O queue in the session.
 * @offset: out: offset for mmap() of the session with MAP_SHARED.
 * @size: out: bytes of the mapping: struct kite_ring_header, the SQEs at
 *	KITE_QUEUE_SQ_OFFSET, then the CQEs.
 *
 * The buffer stays pinned until KITE_IOC_DESTROY_QUEUE or the end of the session, and counts
 * against RLIMIT_MEMLOCK of the process and of the user. A mapping keeps the session open. The
 * kernel acts for the user, and charges memory to the cgroup, of the process that made this
 * request.
 *
 * The kernel polls the submission ring until it sets KITE_QUEUE_NEED_WAKEUP. After storing the
 * tail, issue a full memory barrier, test the flag, and call KITE_IOC_ENTER if it is set. The
 * kernel consumes at most as many SQEs as fit in the completion ring; test the flag also after
 * consuming CQEs while SQEs are pending. While the completion ring has CQEs, poll() reports
 * POLLIN. A child process does not inherit the mapping. After the RNIC was removed no SQE is
 * consumed. EBUSY (the session has KITE_QUEUES_MAX), EFAULT, EINTR, EINVAL, ENOMEM (also over
 * RLIMIT_MEMLOCK).
 */
struct kite_create_queue {
	__u64 addr;
	__u64 len;
	__u32 entries;
	__u32 reserved;
	__u64 queue;
	__u64 offset;
	__u64 size;
};

/**
 * struct kite_destroy_queue - destroys an I/O queue.
 * @queue: in: number of the I/O queue.
 *
 * The request waits for work requests posted to the RNIC. Requests that wait for another node or
 * user continue, as do work requests pushed to VQPs; the buffer stays pinned until they end. The
 * mapping stays valid, without function. EBADF.
 */
struct kite_destroy_queue {
	__u64 queue;
};

/**
 * struct kite_enter - resumes polling of an I/O queue, and waits for completions.
 * @queue: in: number of the I/O queue.
 * @want: in: number of CQEs to wait for, at most the entries of the queue.
 * @ready: out: number of CQEs from @cq_head on.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 *
 * EBADF, EINTR, EINVAL, ENODEV, ETIMEDOUT.
 */
struct kite_enter {
	__u64 queue;
	__u32 want;
	__u32 ready;
	__u32 timeout_ms;
	__u32 reserved;
};

/**
 * struct kite_cancel - cancels a submission.
 * @queue: in: number of the I/O queue.
 * @tag: in: tag of a submission that was consumed and has not started, or that waits for a
 *	reply.
 *
 * The submission completes with ECANCELED. A call may have been executed, or may be executed later.
 * If several submissions have the tag, one is canceled. EBADF; ENOENT: the submission has
 * completed, was not consumed, or is being executed.
 */
struct kite_cancel {
	__u64 queue;
	__u64 tag;
};

/* Priorities. */
#define KITE_PRIORITY_HIGH 0
#define KITE_PRIORITY_LOW 1

/**
 * struct kite_priority - sets the priority of later requests of the session.
 * @priority: in: KITE_PRIORITY_*; high by default.
 * @reserved: zero.
 *
 * The policy, struct kite_qos, defines how low-priority requests yield. They never starve. EINVAL.
 */
struct kite_priority {
	__u32 priority;
	__u32 reserved;
};

/* Policies for low-priority requests of an RNIC. */
#define KITE_QOS_NONE 0 /* no difference */
/*
 * Rate limit (LITE, SW-Pri): low priority gets the rate that high priority leaves, and less while
 * the latency of high priority is inflated. No cost while no session has low priority.
 */
#define KITE_QOS_SW 1
/* A QP of its own to each node for reads and writes of low priority (LITE, HW-Sep). */
#define KITE_QOS_HW 2

/* Sets @policy. */
#define KITE_QOS_SET 1

/**
 * struct kite_qos - returns or sets the policy for low-priority requests of the session's RNIC.
 * @policy: out, or in with KITE_QOS_SET: KITE_QOS_*; KITE_QOS_SW by default.
 * @flags: in: 0 or KITE_QOS_SET.
 * @rate: out: current rate of low priority in bytes per second, with 256 bytes added per
 *	request; 0 is unlimited.
 * @sessions: out: number of low-priority sessions.
 * @reserved: zero.
 *
 * EINVAL; EPERM: KITE_QOS_SET needs CAP_NET_ADMIN.
 */
struct kite_qos {
	__u32 policy;
	__u32 flags;
	__u64 rate;
	__u32 sessions;
	__u32 reserved;
};

/* Maximum limits of an RNIC. */
#define KITE_LIMITS_MAX 1024

/* Subject of a limit. */
#define KITE_LIMIT_USER 1 /* user, by UID */
/* processes of a cgroup and its descendants, by ID in the unified hierarchy */
#define KITE_LIMIT_CGROUP 2

/**
 * struct kite_limit - limits the rate of a user or a cgroup at the session's RNIC.
 * @subject: in: KITE_LIMIT_*.
 * @reserved: zero.
 * @id: in: UID, or ID of the cgroup: the inode number of its directory.
 * @bytes: in: bytes per second, 0 is unlimited. Counted are bytes sent and received by
 *	reads, writes, RPCs with their rendezvous buffers, fills and copies.
 * @requests: in: requests per second, 0 is unlimited. A read or write counts once per 256
 *	KiB, or once by an I/O queue. A work request of a VQP counts once; those of one struct
 *	kite_push are admitted together.
 * @bytes_used: zero; out in a listing: bytes since the limit was first set.
 * @requests_used: zero; out in a listing: requests since the limit was first set.
 * @waits: zero; out in a listing: number of checks that delayed a request.
 *
 * 0 for both @bytes and @requests removes the limit. Requests over a limit wait, at most until
 * their deadline. A session is under the limits of its effective user and its cgroups at the time
 * of KITE_IOC_BIND; all of them apply. Accesses to memory of this node, and requests of the kernel,
 * are not limited. Limits last until the RNIC or the module is removed. EINVAL, ENOSPC, EPERM:
 * needs CAP_NET_ADMIN.
 */
struct kite_limit {
	__u32 subject;
	__u32 reserved;
	__u64 id;
	__u64 bytes;
	__u64 requests;
	__u64 bytes_used;
	__u64 requests_used;
	__u64 waits;
};

/**
 * struct kite_list_limits - lists the limits of the session's RNIC.
 * @limits: in: pointer to an array of struct kite_limit.
 * @count: in: capacity of the array; out: number of limits (at most the capacity were written).
 * @reserved: zero.
 */
struct kite_list_limits {
	__u64 limits;
	__u32 count;
	__u32 reserved;
};

/**
 * struct kite_query_region - returns the attributes of a region.
 * @handle: in: the handle.
 * @len: out: bytes.
 * @chunk_size: out: bytes of each physically contiguous chunk but the last, a power of two.
 * @region: out: ID of the region at its home.
 * @rights: out: rights of the handle.
 * @home: out: home of the region.
 * @owner: out: UID of the owner.
 * @reserved: out: zero.
 *
 * EACCES (the rights were revoked), EBADF, EHOSTDOWN (the home died), ESTALE.
 */
struct kite_query_region {
	__u64 handle;
	__u64 len;
	__u64 chunk_size;
	__u64 region;
	__u32 rights;
	__u32 home;
	__u32 owner;
	__u32 reserved;
};

/* Flag of struct kite_region_entry: the name belongs to an older region. */
#define KITE_REGION_CONFLICT 1

/**
 * struct kite_region_entry - a named region in a listing.
 * @name: name of the region.
 * @region: ID of the region, unique at its home.
 * @created_at: time of creation by the clock of the home, in ns since 1970.
 * @len: bytes.
 * @owner: UID of the owner.
 * @other_rights: rights of users without a grant.
 * @open_handles: number of open handles in the cluster.
 * @home: home of the region.
 * @flags: 0 or KITE_REGION_CONFLICT.
 * @reserved: zero.
 *
 * If nodes that could not reach each other have created two regions of one name, the name belongs
 * to the older one, by the clocks of the homes. The other one is in conflict: it can be opened by
 * @home and @region only, until it is renamed, or the older one is renamed or freed. The flag is
 * not set while the nodes that store the name do not reply.
 */
struct kite_region_entry {
	char name[KITE_NAME_SIZE];
	__u64 region;
	__u64 created_at;
	__u64 len;
	__u32 owner;
	__u32 other_rights;
	__u32 open_handles;
	__u32 home;
	__u32 flags;
	__u32 reserved;
};

/**
 * struct kite_list_regions - lists the named regions of one home, a page at a time.
 * @node: in: the home, or KITE_NODE_SELF.
 * @count: in: capacity of @entries, at least 1; out: entries written. 0 is the end of the listing.
 * @cursor: in: 0 to start, then as returned; out: position of the next page.
 * @entries: in: pointer to an array of struct kite_region_entry.
 *
 * EHOSTDOWN, EHOSTUNREACH, EINVAL, ETIMEDOUT.
 */
struct kite_list_regions {
	__u32 node;
	__u32 count;
	__u64 cursor;
	__u64 entries;
};

/**
 * struct kite_address - address of a node's setup QP (UD) on the fabric.
 * @gid: GID.
 * @qpn: QP number.
 * @lid: LID, or 0 on Ethernet.
 * @link_layer: 1 InfiniBand, 2 Ethernet.
 * @reserved: zero.
 * @mtu: maximum path MTU in bytes.
 * @reserved2: zero.
 */
struct kite_address {
	__u8 gid[16];
	__u32 qpn;
	__u16 lid;
	__u8 link_layer;
	__u8 reserved;
	__u32 mtu;
	__u32 reserved2;
};

/*
 * Optional features of a module: bits of @features in struct kite_query_rnic and struct
 * kite_member. Modules of one cluster may differ in them. A request that needs a feature of another
 * node fails with EOPNOTSUPP if the node lacks it. Bits that a module does not know have no effect.
 */
#define KITE_FEATURE_RENAME (1 << 0) /* regions of the node can be renamed by other nodes */

/**
 * struct kite_member - a member of a view.
 * @node: node number.
 * @reserved: zero.
 * @incarnation: differs for each membership of the node.
 * @address: address of the setup QP.
 * @admitted_epoch: epoch of the view that admitted the node last: when it joined, or when it became
 *	reachable again.
 * @unreachable_since: epoch of the view since which the node is unreachable, 0 while it is
 *	reachable.
 * @features: KITE_FEATURE_* of the module of the node, constant in an incarnation.
 *
 * An unreachable member is fenced: it has no access to the memory of other nodes, and requests to
 * it fail with EHOSTDOWN. Its regions, names and loans remain.
 */
struct kite_member {
	__u32 node;
	__u32 reserved;
	__u64 incarnation;
	struct kite_address address;
	__u64 admitted_epoch;
	__u64 unreachable_since;
	__u64 features;
};

/**
 * struct kite_get_view - returns the current view.
 * @epoch: out: epoch of the view, 0 without a view.
 * @self: out: number of this node, 0 without a view.
 * @count: in: capacity of @members; out: number of members (at most the capacity were written).
 * @members: in: pointer to an array of struct kite_member.
 *
 * Without a view the request succeeds with an @epoch of 0.
 */
struct kite_get_view {
	__u64 epoch;
	__u32 self;
	__u32 count;
	__u64 members;
};

/**
 * struct kite_query_rnic - returns the attributes of an RNIC that kite uses.
 * @index: in: 0, 1, … in order of arrival, of those that the process may bind to; ENOENT past the
 *	last. Needs no KITE_IOC_BIND.
 * @active: out: 1 if the port is active.
 * @name: out: name of the RNIC.
 * @address: out: address of this node through the RNIC. The QP number is constant while the RNIC is
 *	present.
 * @has_dc: out: 1 if the RNIC has the DC transport.
 * @wire_version: out: version of the messages between kernels, the same for all members of a view.
 * @features: out: KITE_FEATURE_* of the module.
 *
 * ENODEV if the RNIC is being removed.
 */
struct kite_query_rnic {
	__u32 index;
	__u32 active;
	char name[KITE_RNIC_NAME_SIZE];
	struct kite_address address;
	__u32 has_dc;
	__u32 wire_version;
	__u64 features;
};

/**
 * struct kite_stats - counters of the RNIC since its arrival, and gauges (marked so).
 *
 * Counters never decrease. Bytes are payload. An operation is one read, write, fill, copy, atomic
 * operation, RPC, lock acquisition or barrier.
 */
struct kite_stats {
	__u64 reads;
	__u64 read_bytes;
	__u64 writes;
	__u64 write_bytes;
	__u64 fills;
	__u64 fill_bytes;
	__u64 copies;
	__u64 copy_bytes; /* bytes through this node count as read and written, too */
	__u64 migrations; /* migrations of regions of this node */
	__u64 migrated_bytes; /* also by migrations that failed later */
	__u64 atomics;
	__u64 rpcs; /* calls with a reply, and messages sent */
	__u64 rpcs_served; /* calls and messages that servers received */
	__u64 locks; /* locks acquired */
	__u64 barriers; /* barriers passed */
	__u64 lock_waits; /* waits for locks and at barriers */
	__u64 local_bytes; /* bytes above that stayed on this node */
	__u64 errors; /* operations that failed */
	__u64 sqes; /* SQEs consumed from I/O queues */
	__u64 retries; /* segments, control and ring messages retried after a QP failure */
	__u64 work_requests; /* work requests posted */
	__u64 blocked_waits; /* waits that slept after polling */
	__u64 slot_waits; /* waits for a free slot */
	__u64 credit_waits; /* checks that found no send queue credits */
	__u64 ring_waits; /* waits for credits of an RPC ring */
	__u64 throttled; /* checks that delayed a request by its priority or a limit */
	__u64 unmatched_completions; /* completions without a slot or an endpoint, dropped */
	__u64 ctrl_requests; /* control requests sent */
	__u64 ctrl_requests_served; /* control requests served */
	__u64 malformed_messages; /* malformed messages, or of an unknown sender, dropped */
	__u64 duplicate_messages; /* duplicate requests and messages, dropped */
	__u64 qp_connects; /* QPs connected */
	__u64 qp_errors; /* QP failures */
	__u64 qp_evictions; /* idle QPs evicted */
	__u64 dci_errors; /* DCI failures */
	__u64 dc_replays; /* work requests of VQPs retried after a failure of their QP */
	__u64 vqp_requests; /* work requests pushed to VQPs */
	__u64 vqp_rc_requests; /* work requests of VQPs by RC */
	__u64 transport_switches; /* switches of VQPs between DC and RC */
	__u64 promotions; /* peers promoted to RC */
	__u64 vqp_messages_received; /* messages received by VQPs */
	__u64 directory_hits; /* DCT addresses found in the cache */
	__u64 directory_reads; /* READs of the DCT directory */
	__u64 directory_misses; /* DCT addresses missing in the directory */
	__u64 wakeups; /* wake-ups of the poller thread */
	__u64 lent_bytes; /* gauge: memory lent to other nodes through this RNIC */
	__u64 regions; /* gauge: regions whose home is this node */
	__u64 open_handles; /* gauge: open handles of this node, rendezvous buffers included */
	__u64 connected_qps; /* gauge: connected RC QPs */
	__u64 promoted_peers; /* gauge: peers that VQPs reach by RC */
	__u64 dcis; /* gauge: DCIs */
	__u64 inflight; /* gauge: work requests in flight */
	__u64 sessions; /* gauge: bound sessions */
	__u64 io_queues; /* gauge: I/O queues */
};

/* Maximum of @size of struct kite_get_stats in bytes. */
#define KITE_STATS_SIZE_MAX 4096

/**
 * struct kite_get_stats - reads the statistics of the RNIC of the session.
 * @stats: in: pointer to struct kite_stats.
 * @size: in: size of that structure in the caller's header, at most KITE_STATS_SIZE_MAX; out: size
 *	in the kernel.
 * @reserved: zero.
 *
 * Later versions append counters. The kernel writes the first @size bytes, with zeros after its own
 * last counter. EFAULT, EINVAL (@size is more than KITE_STATS_SIZE_MAX).
 */
struct kite_get_stats {
	__u64 stats;
	__u32 size;
	__u32 reserved;
};

/**
 * struct kite_parameters - the module parameters in effect, each limited to its range.
 * @conns_per_peer: RC queue pairs per peer.
 * @max_idle_conns: maximum idle RC queue pairs kept per RNIC.
 * @max_inflight: maximum operations in flight per RNIC.
 * @max_promoted: maximum peers that virtual queue pairs reach by RC.
 * @max_lent_mib: maximum memory lent to other nodes, in MiB; 0 is half of RAM.
 * @max_local_mib: maximum memory of this node in regions of its own users, in MiB; 0 is no limit.
 * @max_poll_us: maximum time that a waiter polls before it sleeps, in microseconds.
 * @default_timeout_ms: deadline of requests that set none, in milliseconds.
 *
 * All members are output. Needs no KITE_IOC_BIND.
 */
struct kite_parameters {
	__u32 conns_per_peer;
	__u32 max_idle_conns;
	__u32 max_inflight;
	__u32 max_promoted;
	__u32 max_lent_mib;
	__u32 max_local_mib;
	__u32 max_poll_us;
	__u32 default_timeout_ms;
};

/* Kinds of events. */
/* @value: a handle whose region was freed, whose home died, or whose rights were revoked */
#define KITE_EVENT_STALE 1
/*
 * To the daemon's session. @value: a node that does not respond. Repeated at most once per second
 * while requests to the node time out.
 */
#define KITE_EVENT_PEER_UNREACHABLE 2

/**
 * struct kite_event - dequeues the next event of the session.
 * @kind: out: KITE_EVENT_*.
 * @reserved: out: zero.
 * @value: out: see KITE_EVENT_*.
 *
 * poll() reports POLLIN while an event is queued, and POLLERR and POLLHUP after the RNIC was
 * removed. EAGAIN (no event), ENODEV (no event, and the RNIC was removed).
 */
struct kite_event {
	__u32 kind;
	__u32 reserved;
	__u64 value;
};

/**
 * struct kite_join - makes the session the daemon's session of its RNIC.
 * @node: in: number of this node, 1 … KITE_NODE_MAX.
 * @reserved: zero.
 * @incarnation: in: incarnation of this node, not 0.
 * @secret: in: secret that authenticates kernels of the cluster to each other.
 *
 * Needs CAP_NET_ADMIN. Closing the last descriptor of the session leaves the cluster: all mappings
 * end, regions whose home is this node are freed, and another session may join at once, with epochs
 * from 1. A duplicate of the descriptor continues the session in another process. EBUSY (the RNIC
 * has a daemon), EINVAL, EPERM.
 */
struct kite_join {
	__u32 node;
	__u32 reserved;
	__u64 incarnation;
	__u8 secret[16];
};

/**
 * struct kite_set_view - sets the members of the cluster, this node included.
 * @epoch: in: greater than the epoch of the previous view.
 * @count: in: number of @members, 1 … KITE_NODES_MAX.
 * @reserved: zero.
 * @members: in: pointer to an array of struct kite_member, in ascending order of node
 *	numbers.
 *
 * Returns when removed and unreachable nodes can no longer access memory of this node. EINVAL (the
 * epoch does not increase, the members are not in order, an epoch of a member is above @epoch, a
 * member is unreachable since an epoch before its admission, this node in its incarnation is not a
 * reachable member, or its address differs from that of the RNIC), ENOMEM, EPERM (not the daemon's
 * session).
 */
struct kite_set_view {
	__u64 epoch;
	__u32 count;
	__u32 reserved;
	__u64 members;
};

/**
 * struct kite_probe - waits until the kernel of a reachable node replies to a request.
 * @node: in: node number.
 * @timeout_ms: in: maximum time to wait, in ms, 1 … KITE_PROBE_TIMEOUT_MS_MAX.
 * @incarnation: in: incarnation of the node.
 *
 * The request and its reply take the RC connections to the node. Needs CAP_NET_ADMIN. EHOSTDOWN
 * (the node in this incarnation is not a reachable member), EHOSTUNREACH (no view), EINTR, EINVAL,
 * ENOMEM, EPERM, ETIMEDOUT (no reply).
 */
struct kite_probe {
	__u32 node;
	__u32 timeout_ms;
	__u64 incarnation;
};

#define KITE_PROBE_TIMEOUT_MS_MAX 60000

/* Not assigned in Documentation/userspace-api/ioctl/ioctl-number.rst of Linux 7.3. */
#define KITE_IOC_MAGIC 0xBC

#define KITE_IOC_BIND _IOWR(KITE_IOC_MAGIC, 0x00, struct kite_bind)
#define KITE_IOC_ALLOC _IOWR(KITE_IOC_MAGIC, 0x01, struct kite_alloc)
#define KITE_IOC_MAP _IOWR(KITE_IOC_MAGIC, 0x02, struct kite_map)
#define KITE_IOC_UNMAP _IOW(KITE_IOC_MAGIC, 0x03, struct kite_handle)
#define KITE_IOC_FREE _IOW(KITE_IOC_MAGIC, 0x04, struct kite_handle)
#define KITE_IOC_READ _IOW(KITE_IOC_MAGIC, 0x05, struct kite_rw)
#define KITE_IOC_WRITE _IOW(KITE_IOC_MAGIC, 0x06, struct kite_rw)
#define KITE_IOC_QUERY_REGION _IOWR(KITE_IOC_MAGIC, 0x07, struct kite_query_region)
#define KITE_IOC_LIST_REGIONS _IOWR(KITE_IOC_MAGIC, 0x08, struct kite_list_regions)
#define KITE_IOC_GET_EVENT _IOR(KITE_IOC_MAGIC, 0x09, struct kite_event)
#define KITE_IOC_ATOMIC _IOWR(KITE_IOC_MAGIC, 0x0a, struct kite_atomic)
#define KITE_IOC_SERVE _IOW(KITE_IOC_MAGIC, 0x0b, struct kite_serve)
#define KITE_IOC_CALL _IOWR(KITE_IOC_MAGIC, 0x0c, struct kite_call)
#define KITE_IOC_RECEIVE _IOWR(KITE_IOC_MAGIC, 0x0d, struct kite_receive)
#define KITE_IOC_REPLY _IOW(KITE_IOC_MAGIC, 0x0e, struct kite_reply)
#define KITE_IOC_REPLY_RECEIVE _IOWR(KITE_IOC_MAGIC, 0x0f, struct kite_reply_receive)

#define KITE_IOC_LOCK _IOWR(KITE_IOC_MAGIC, 0x10, struct kite_lock)
#define KITE_IOC_UNLOCK _IOW(KITE_IOC_MAGIC, 0x11, struct kite_unlock)
#define KITE_IOC_BARRIER _IOWR(KITE_IOC_MAGIC, 0x12, struct kite_barrier)
#define KITE_IOC_FILL _IOW(KITE_IOC_MAGIC, 0x13, struct kite_fill)
#define KITE_IOC_COPY _IOW(KITE_IOC_MAGIC, 0x14, struct kite_copy)
#define KITE_IOC_GRANT _IOW(KITE_IOC_MAGIC, 0x15, struct kite_grant)
#define KITE_IOC_CREATE_QUEUE _IOWR(KITE_IOC_MAGIC, 0x16, struct kite_create_queue)
#define KITE_IOC_ENTER _IOWR(KITE_IOC_MAGIC, 0x17, struct kite_enter)
#define KITE_IOC_DESTROY_QUEUE _IOW(KITE_IOC_MAGIC, 0x18, struct kite_destroy_queue)
#define KITE_IOC_CANCEL _IOW(KITE_IOC_MAGIC, 0x19, struct kite_cancel)
#define KITE_IOC_READV _IOW(KITE_IOC_MAGIC, 0x1a, struct kite_rwv)
#define KITE_IOC_WRITEV _IOW(KITE_IOC_MAGIC, 0x1b, struct kite_rwv)
#define KITE_IOC_REGISTER _IOWR(KITE_IOC_MAGIC, 0x1c, struct kite_register)

#define KITE_IOC_SET_PRIORITY _IOW(KITE_IOC_MAGIC, 0x1d, struct kite_priority)
#define KITE_IOC_MIGRATE _IOW(KITE_IOC_MAGIC, 0x1e, struct kite_migrate)
#define KITE_IOC_RENAME _IOW(KITE_IOC_MAGIC, 0x1f, struct kite_rename)

#define KITE_IOC_GET_VIEW _IOWR(KITE_IOC_MAGIC, 0x20, struct kite_get_view)
#define KITE_IOC_QUERY_RNIC _IOWR(KITE_IOC_MAGIC, 0x21, struct kite_query_rnic)
#define KITE_IOC_GET_STATS _IOWR(KITE_IOC_MAGIC, 0x22, struct kite_get_stats)

#define KITE_IOC_QOS _IOWR(KITE_IOC_MAGIC, 0x23, struct kite_qos)
#define KITE_IOC_SET_LIMIT _IOW(KITE_IOC_MAGIC, 0x24, struct kite_limit)
#define KITE_IOC_LIST_LIMITS _IOWR(KITE_IOC_MAGIC, 0x25, struct kite_list_limits)
#define KITE_IOC_GET_PARAMETERS _IOR(KITE_IOC_MAGIC, 0x26, struct kite_parameters)

/*
 * Virtual queue pairs (VQPs, KRCORE): verbs to one node over QPs that all processes share. With DC
 * (mlx5) a VQP needs no connection; without DC it uses the RC connection of the node.
 */

/* Maximum memory registrations of all processes for an RNIC. */
#define KITE_MRS_MAX 2048

/* Maximum bytes of a registration. */
#define KITE_MR_SIZE_MAX (256 << 20)

/* Maximum work requests of a VQP that are not popped, and of one push. */
#define KITE_VQP_DEPTH 256
#define KITE_PUSH_MAX 32

/**
 * struct kite_reg_mr - registers memory of the process for VQPs.
 * @addr: in: memory that the process may write.
 * @len: in: bytes, 1 … KITE_MR_SIZE_MAX.
 * @other_rights: in: rights of users other than the owner (the caller's effective user) and
 *	root, with the key: KITE_READ, KITE_WRITE. Both together allow atomics.
 * @key: out: key for work requests, local and remote.
 *
 * The pages stay pinned, and count against RLIMIT_MEMLOCK, until KITE_IOC_DEREG_MR or the end of
 * the session, and up to 2.5 s longer: until no request of another node can access them. A
 * registration over the limit waits for pages in that state, as does a registration of a user with
 * one eighth of RAM or 512 registrations in that state. After a fork the pages belong to the
 * parent. EFAULT, EHOSTUNREACH, EINTR, EINVAL, ENOMEM (over the limit, no memory, or KITE_MRS_MAX),
 * ENXIO (longer than the keys of an RNIC other than mlx5).
 */
struct kite_reg_mr {
	__u64 addr;
	__u64 len;
	__u32 other_rights;
	__u32 key;
};

/**
 * struct kite_dereg_mr - deregisters memory of the session.
 * @key: in: key of the memory.
 * @reserved: zero.
 *
 * EBADF.
 */
struct kite_dereg_mr {
	__u32 key;
	__u32 reserved;
};

/**
 * struct kite_connect - creates a VQP to a node.
 * @node: in: a node of the view; without DC another node than this one.
 * @port: in: port of the listener that receives messages, or 0 for none.
 * @timeout_ms: in: deadline in milliseconds, or 0 for the default of the module.
 * @flags: in: 0 or KITE_CONNECT_OWNER.
 * @owner: in: with KITE_CONNECT_OWNER the user that the listener must belong to, else zero.
 * @reserved: zero.
 * @vqp: out: number of the VQP.
 *
 * No message is sent to the node before the first SEND. The kernel of the node checks @owner before
 * a process receives a message: if the listener belongs to another user, the VQP is closed with
 * EACCES.
 * EBUSY (the session has KITE_VQPS_MAX), EHOSTDOWN, EHOSTUNREACH, EINTR, EINVAL (this node, without
 * DC; @owner without a port, or not in the user namespace), ENOMEM, ETIMEDOUT.
 */
struct kite_connect {
	__u32 node;
	__u32 port;
	__u32 timeout_ms;
	__u32 flags;
	__u32 owner;
	__u32 reserved;
	__u64 vqp;
};

/* Flag of struct kite_connect: @owner is set. */
#define KITE_CONNECT_OWNER (1 << 0)

/* Maximum VQPs and listeners of a session. */
#define KITE_VQPS_MAX 64

/**
 * struct kite_close_vqp - closes a VQP.
 * @vqp: in: number of the VQP.
 *
 * The request waits for work requests posted to the RNIC. Work requests of I/O queues complete with
 * ECANCELED. The other end of the VQP receives ECONNRESET. EBADF.
 */
struct kite_close_vqp {
	__u64 vqp;
};

/**
 * struct kite_listen - creates a listener for VQPs at a port.
 * @port: in: not 0; a port of a node has one listener.
 * @reserved: zero.
 * @listener: out: number for KITE_IOC_ACCEPT and KITE_IOC_CLOSE_LISTENER.
 *
 * Up to KITE_RECV_CREDITS messages of a VQP are queued before it is accepted.
 * EADDRINUSE, EBUSY (the session has KITE_VQPS_MAX), EHOSTUNREACH, EINVAL, ENOMEM.
 */
struct kite_listen {
	__u32 port;
	__u32 reserved;
	__u64 listener;
};

/**
 * struct kite_close_listener - closes a listener.
 * @listener: in: number of the listener.
 *
 * The port is free for another listener. Accepted VQPs stay open. The other end of a VQP that was
 * not accepted receives ECONNRESET. EBADF.
 */
struct kite_close_listener {
	__u64 listener;
};

/* Messages that are queued at the receiver of a VQP. Further messages wait at the sender. */
#define KITE_RECV_CREDITS 32

/**
 * struct kite_accept - accepts a VQP whose other end has sent a message to the port.
 * @listener: in: number of the listener.
 * @vqp: out: number of the VQP in this session.
 * @node: out: node of the other end.
 * @uid: out: user of the other end.
 * @timeout_ms: in: maximum wait in milliseconds, or 0 for the default of the module.
 * @flags: in: 0 or KITE_NOWAIT.
 *
 * EAGAIN (no VQP to accept), EBADF (also if the listener is closed meanwhile), EBUSY (the session
 * has KITE_VQPS_MAX), EINTR, ENOMEM, ETIMEDOUT.
 */
struct kite_accept {
	__u64 listener;
	__u64 vqp;
	__u32 node;
	__u32 uid;
	__u32 timeout_ms;
	__u32 flags;
};

/* Opcodes of a work request. */
#define KITE_WR_OP_READ 1 /* copies remote memory to local memory */
#define KITE_WR_OP_WRITE 2
#define KITE_WR_OP_COMPARE_SWAP 3 /* 8 bytes; stores the previous value in local memory */
#define KITE_WR_OP_FETCH_ADD 4
#define KITE_WR_OP_SEND 5 /* sends a message to the other end */

/* Flags of a work request. */
#define KITE_WR_FLAG_SIGNALED (1 << 0) /* completes also on success */
#define KITE_WR_FLAG_FENCE (1 << 1) /* starts after earlier reads and atomics have completed */

/* @operand is immediate data of a SEND, or of a message that follows a WRITE. */
#define KITE_WR_FLAG_WITH_IMM (1 << 2)

/**
 * struct kite_send_wr - work request of a VQP.
 * @tag: in: copied to the completion; in a struct kite_sqe, which has a tag of its own, the
 *	number of the VQP.
 * @addr: in: address of local memory.
 * @remote_addr: in: address of remote memory in the address space of its owner; a multiple
 *	of 8 for atomics, zero for SEND.
 * @operand: in: addend, value to swap in, or 32 bits of immediate data; else zero.
 * @expected: in: comparand; else zero.
 * @len: in: bytes, at least 1; 8 for atomics.
 * @key: in: key of the local memory, registered by this session.
 * @remote_key: in: key of the remote memory; zero for SEND.
 * @op: in: KITE_WR_OP_READ … KITE_WR_OP_SEND.
 * @flags: in: any of KITE_WR_FLAG_SIGNALED, KITE_WR_FLAG_FENCE and KITE_WR_FLAG_WITH_IMM.
 *
 * A SEND, or a WRITE with immediate data, completes when the message is at the other node and a
 * process has accepted the VQP. A SEND of more than KITE_SEND_MAX bytes completes when the message
 * was received; its memory is read until then. After a message fails, all later work requests of
 * the VQP fail.
 */
struct kite_send_wr {
	__u64 tag;
	__u64 addr;
	__u64 remote_addr;
	__u64 operand;
	__u64 expected;
	__u32 len;
	__u32 key;
	__u32 remote_key;
	__u16 op;
	__u16 flags;
};

/* The receiver reads longer messages from the sender; without DC those of more than 956 bytes. */
#define KITE_SEND_MAX 4028

/**
 * struct kite_push - pushes work requests to a VQP: all of them, or none.
 * @vqp: in: number of the VQP.
 * @wrs: in: pointer to @count struct kite_send_wr.
 * @count: in: 1 … KITE_PUSH_MAX.
 * @timeout_ms: in: deadline in milliseconds for reading the attributes of remote keys, and
 *	for admission by the priority and limits of the session; or 0 for the default of the
 *	module.
 *
 * Work requests execute in order, but a write may overtake earlier reads and atomics unless it
 * has KITE_WR_FLAG_FENCE, as with verbs. If a shared QP fails, reads and writes whose outcome is
 * unknown are executed again: a write may overwrite a later write of another process. Each work
 * request is checked before any is posted. A rejected push affects no other user, and leaves the
 * VQP unchanged. EACCES (the key does not allow the access, or KITE_CONNECT_OWNER), EBADF (no
 * such @vqp, or @key of this session), ECONNREFUSED, ECONNRESET, EHOSTDOWN, EHOSTUNREACH, EINTR,
 * EINVAL (also a message by a VQP without a port), ENOBUFS (more than KITE_VQP_DEPTH not popped,
 * or pending from I/O queues), ENOENT (no such @remote_key), ERANGE, ETIMEDOUT.
 */
struct kite_push {
	__u64 vqp;
	__u64 wrs;
	__u32 count;
	__u32 timeout_ms;
};

/**
 * struct kite_pop - pops completions of a VQP, in the order of their work requests.
 * @vqp: in: number of the VQP.
 * @completions: in: pointer to @count struct kite_cqe. @tag is that of the work request.
 *	@error is 0; ETIMEDOUT: the node did not respond; EIO: the node or the RNIC rejected the
 *	operation; EACCES, ENOENT, ERANGE: the remote memory changed while the work request
 *	waited; ECANCELED: an earlier work request failed; or ECONNREFUSED, ECONNRESET,
 *	EHOSTDOWN, EHOSTUNREACH as below. A failed atomic operation may have been executed.
 *	Atomics executed by the kernel of the node may be executed later, also after the VQP was
 *	closed, and can fail with ENXIO (the RNIC of the node has atomics, but not for this one)
 *	and ENOMEM.
 * @count: in: capacity, at least 1; out: number of completions.
 * @timeout_ms: in: maximum wait for the first completion in milliseconds, or 0 for the default of
 *	the module.
 * @flags: in: 0 or KITE_NOWAIT.
 * @reserved: zero.
 *
 * EBADF, EAGAIN (no completion), EINTR, EINVAL, ETIMEDOUT. After the last completion of a closed
 * VQP: EACCES (KITE_CONNECT_OWNER), ECONNREFUSED, ECONNRESET (also after a failed message),
 * EHOSTDOWN, EHOSTUNREACH.
 */
struct kite_pop {
	__u64 vqp;
	__u64 completions;
	__u32 count;
	__u32 timeout_ms;
	__u32 flags;
	__u32 reserved;
};

/* Flags of a received message. */
#define KITE_RECV_FLAG_WITH_IMM (1 << 2) /* has immediate data */
#define KITE_RECV_FLAG_PLACED (1 << 3) /* has no data: a WRITE placed the bytes */

/**
 * struct kite_pop_message - pops the first message of a VQP.
 * @vqp: in: number of the VQP.
 * @addr: in: address of the buffer.
 * @key: in: key of the buffer, registered by this session.
 * @len: in: bytes of the buffer; out: bytes of the message.
 * @immediate: out: immediate data, if @flags has KITE_RECV_FLAG_WITH_IMM.
 * @flags: in: 0 or KITE_NOWAIT, to be set before each call; out: any of KITE_RECV_FLAG_*.
 * @timeout_ms: in: maximum wait in milliseconds, or 0 for the default of the module.
 * @reserved: zero.
 *
 * Messages of one sender arrive in order, and before the error of a closed VQP. EAGAIN (no
 * message), EACCES (KITE_CONNECT_OWNER), EBADF, ECONNREFUSED, ECONNRESET, EHOSTDOWN,
 * EHOSTUNREACH, EINTR, EINVAL (a VQP without a port), EMSGSIZE (longer than @len; the message
 * stays queued), ERANGE, ETIMEDOUT.
 */
struct kite_pop_message {
	__u64 vqp;
	__u64 addr;
	__u32 key;
	__u32 len;
	__u32 immediate;
	__u32 flags;
	__u32 timeout_ms;
	__u32 reserved;
};

/* State of a VQP. */
#define KITE_VQP_STATE_RC (1 << 0) /* uses RC */
#define KITE_VQP_STATE_CLOSED (1 << 1) /* closed: rejects work requests */
#define KITE_VQP_STATE_READABLE (1 << 2) /* a message is queued */

/**
 * struct kite_vqp_info - a VQP of a process in a listing.
 * @node: out: other node.
 * @port: out: port that the VQP is connected to, or was accepted at; 0 for none.
 * @uid: out: user.
 * @pid: out: process that created or accepted the VQP.
 * @flags: out: any of KITE_VQP_STATE_*.
 * @pending: out: work requests in progress.
 * @requests: out: work requests pushed.
 * @bytes: out: bytes of the work requests.
 * @messages: out: messages received.
 */
struct kite_vqp_info {
	__u32 node;
	__u32 port;
	__u32 uid;
	__u32 pid;
	__u32 flags;
	__u32 pending;
	__u64 requests;
	__u64 bytes;
	__u64 messages;
};

/**
 * struct kite_list_vqps - lists the VQPs of the caller's user at the session's RNIC; for root, of
 * all users.
 * @vqps: in: pointer to an array of struct kite_vqp_info.
 * @count: in: capacity of the array; out: number of VQPs (at most the capacity were
 *	written).
 * @reserved: zero.
 */
struct kite_list_vqps {
	__u64 vqps;
	__u32 count;
	__u32 reserved;
};

#define KITE_IOC_REG_MR _IOWR(KITE_IOC_MAGIC, 0x28, struct kite_reg_mr)
#define KITE_IOC_DEREG_MR _IOW(KITE_IOC_MAGIC, 0x29, struct kite_dereg_mr)
#define KITE_IOC_CONNECT _IOWR(KITE_IOC_MAGIC, 0x2a, struct kite_connect)
#define KITE_IOC_CLOSE_VQP _IOW(KITE_IOC_MAGIC, 0x2b, struct kite_close_vqp)
#define KITE_IOC_PUSH _IOW(KITE_IOC_MAGIC, 0x2c, struct kite_push)
#define KITE_IOC_POP _IOWR(KITE_IOC_MAGIC, 0x2d, struct kite_pop)
#define KITE_IOC_LISTEN _IOWR(KITE_IOC_MAGIC, 0x2e, struct kite_listen)
#define KITE_IOC_ACCEPT _IOWR(KITE_IOC_MAGIC, 0x2f, struct kite_accept)
#define KITE_IOC_POP_MESSAGE _IOWR(KITE_IOC_MAGIC, 0x30, struct kite_pop_message)
#define KITE_IOC_LIST_VQPS _IOWR(KITE_IOC_MAGIC, 0x31, struct kite_list_vqps)
#define KITE_IOC_CLOSE_LISTENER _IOW(KITE_IOC_MAGIC, 0x32, struct kite_close_listener)

#define KITE_IOC_JOIN _IOW(KITE_IOC_MAGIC, 0x40, struct kite_join)
#define KITE_IOC_SET_VIEW _IOW(KITE_IOC_MAGIC, 0x41, struct kite_set_view)
#define KITE_IOC_PROBE _IOW(KITE_IOC_MAGIC, 0x42, struct kite_probe)

#endif /* _UAPI_KITE_H */
