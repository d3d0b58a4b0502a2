// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Threads that share a queue pair and a completion queue: each adds to a number of the peer, and
 * polls completions of all threads. The program uses verbs alone.
 *
 * verbs_threads DEVICE has the number, and prints it at the end.
 * verbs_threads DEVICE ADDRESS adds to it, and prints the sum of the values before each add.
 */

#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TCP_PORT 18601
#define PORT 1
#define THREADS 4
#define TOTAL 4000
#define DEPTH 64

struct end {
	unsigned long addr;
	unsigned int rkey, qpn, lid;
};

static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static struct end other;
static unsigned long words[TOTAL];
static atomic_int posted, done;

static void check(int good, const char *what)
{
	if (good)
		return;
	perror(what);
	exit(1);
}

static void make(const char *name)
{
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		     IBV_ACCESS_REMOTE_ATOMIC;
	struct ibv_device **device = ibv_get_device_list(NULL);
	struct ibv_context *context;
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = DEPTH, .max_send_sge = 1 },
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
	};
	struct ibv_pd *pd;

	check(!!device, "devices");
	while (*device && strcmp(ibv_get_device_name(*device), name))
		device++;
	check(!!*device, name);
	context = ibv_open_device(*device);
	check(!!context, "context");
	pd = ibv_alloc_pd(context);
	mr = ibv_reg_mr(pd, words, sizeof(words), access);
	cq = ibv_create_cq(context, TOTAL, NULL, NULL, 0);
	check(mr && cq, "memory and completions");
	attr.send_cq = cq;
	attr.recv_cq = cq;
	qp = ibv_create_qp(pd, &attr);
	check(!!qp, "queue pair");
}

static void modify(enum ibv_qp_state state, int mask)
{
	struct ibv_qp_attr attr = {
		.qp_state = state,
		.port_num = PORT,
		.qp_access_flags = IBV_ACCESS_REMOTE_ATOMIC,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = other.qpn,
		.max_rd_atomic = 8,
		.max_dest_rd_atomic = 8,
		.min_rnr_timer = 12,
		.timeout = 14,
		.retry_cnt = 7,
		.rnr_retry = 7,
		.ah_attr = { .dlid = other.lid, .port_num = PORT },
	};

	check(!ibv_modify_qp(qp, &attr, mask | IBV_QP_STATE), "state");
}

static void connect_to_other(void)
{
	modify(IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	modify(IBV_QPS_RTR, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
	       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	modify(IBV_QPS_RTS, IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
	       IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

static int meet(const char *address)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(TCP_PORT) };
	int one = 1, tcp = socket(AF_INET, SOCK_STREAM, 0);

	if (address) {
		at.sin_addr.s_addr = inet_addr(address);
		check(!connect(tcp, (void *)&at, sizeof(at)), address);
		return tcp;
	}
	setsockopt(tcp, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	check(!bind(tcp, (void *)&at, sizeof(at)) && !listen(tcp, 1), "listening");
	puts("listening");
	fflush(stdout);
	return accept(tcp, NULL, NULL);
}

static void exchange(int tcp)
{
	struct ibv_port_attr port;
	struct end own = { .addr = (unsigned long)words, .rkey = mr->rkey, .qpn = qp->qp_num };

	check(!ibv_query_port(qp->context, PORT, &port), "port");
	own.lid = port.lid;
	check(write(tcp, &own, sizeof(own)) == sizeof(own), "telling");
	check(recv(tcp, &other, sizeof(other), MSG_WAITALL) == sizeof(other), "hearing");
}

/* Polls completions once. */
static void poll(void)
{
	struct ibv_wc found[16];
	int i, count = ibv_poll_cq(cq, 16, found);

	check(count >= 0, "polling");
	for (i = 0; i < count; i++) {
		if (found[i].status == IBV_WC_SUCCESS)
			continue;
		fprintf(stderr, "%s\n", ibv_wc_status_str(found[i].status));
		exit(1);
	}
	atomic_fetch_add(&done, count);
}

static void *add(void *unused)
{
	struct ibv_send_wr *bad;
	int i;

	while ((i = atomic_fetch_add(&posted, 1)) < TOTAL) {
		struct ibv_sge word = {
			.addr = (unsigned long)&words[i],
			.length = sizeof(words[i]),
			.lkey = mr->lkey,
		};
		struct ibv_send_wr wr = {
			.wr_id = i,
			.sg_list = &word,
			.num_sge = 1,
			.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
		};

		wr.wr.atomic.remote_addr = other.addr;
		wr.wr.atomic.rkey = other.rkey;
		wr.wr.atomic.compare_add = 1;
		/* The queue has room for fewer requests. */
		while (ibv_post_send(qp, &wr, &bad))
			poll();
	}
	while (atomic_load(&done) < TOTAL)
		poll();
	return unused;
}

int main(int argc, char **argv)
{
	unsigned long i, sum = 0;
	pthread_t threads[THREADS];
	char end;
	int tcp;

	make(argv[1]);
	tcp = meet(argc > 2 ? argv[2] : NULL);
	exchange(tcp);
	connect_to_other();
	/* Both ends are ready. */
	check(write(tcp, "", 1) == 1 && read(tcp, &end, 1) == 1, "waiting");
	if (argc == 2) {
		check(!read(tcp, &end, 1), "the end");
		printf("%lu\n", words[0]);
		return 0;
	}
	for (i = 0; i < THREADS; i++)
		check(!pthread_create(&threads[i], NULL, add, NULL), "thread");
	for (i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	for (i = 0; i < TOTAL; i++)
		sum += words[i];
	printf("%lu\n", sum);
	return 0;
}
