// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Threads that share a QP and a CQ: each executes fetch-and-add on a word of the server, and polls
 * completions of all threads. The program uses verbs alone.
 *
 * verbs_threads DEVICE
 *	server: has the word, and prints its value at the end
 * verbs_threads DEVICE ADDRESS
 *	client: adds to the word, and prints the sum of the previous values
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

/* Address of a QP, and of the memory of its process. */
struct qp_address {
	unsigned long addr;
	unsigned int rkey, qpn, lid;
};

static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static struct qp_address peer;
static unsigned long words[TOTAL];
static atomic_int posted, done;

static void check(int condition, const char *operation)
{
	if (condition)
		return;
	perror(operation);
	exit(1);
}

static void create_objects(const char *name)
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

	check(!!device, "ibv_get_device_list");
	while (*device && strcmp(ibv_get_device_name(*device), name))
		device++;
	check(!!*device, name);
	context = ibv_open_device(*device);
	check(!!context, "ibv_open_device");
	pd = ibv_alloc_pd(context);
	mr = ibv_reg_mr(pd, words, sizeof(words), access);
	cq = ibv_create_cq(context, TOTAL, NULL, NULL, 0);
	check(mr && cq, "ibv_reg_mr or ibv_create_cq");
	attr.send_cq = cq;
	attr.recv_cq = cq;
	qp = ibv_create_qp(pd, &attr);
	check(!!qp, "ibv_create_qp");
}

static void modify(enum ibv_qp_state state, int mask)
{
	struct ibv_qp_attr attr = {
		.qp_state = state,
		.port_num = PORT,
		.qp_access_flags = IBV_ACCESS_REMOTE_ATOMIC,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer.qpn,
		.max_rd_atomic = 8,
		.max_dest_rd_atomic = 8,
		.min_rnr_timer = 12,
		.timeout = 14,
		.retry_cnt = 7,
		.rnr_retry = 7,
		.ah_attr = { .dlid = peer.lid, .port_num = PORT },
	};

	check(!ibv_modify_qp(qp, &attr, mask | IBV_QP_STATE), "ibv_modify_qp");
}

static void connect_qp(void)
{
	modify(IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	modify(IBV_QPS_RTR, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
	       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	modify(IBV_QPS_RTS, IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
	       IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

/* Connects to the server, or accepts the client. Returns the socket. */
static int open_socket(const char *address)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(TCP_PORT) };
	int one = 1, tcp = socket(AF_INET, SOCK_STREAM, 0);

	if (address) {
		addr.sin_addr.s_addr = inet_addr(address);
		check(!connect(tcp, (void *)&addr, sizeof(addr)), address);
		return tcp;
	}
	setsockopt(tcp, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	check(!bind(tcp, (void *)&addr, sizeof(addr)) && !listen(tcp, 1), "bind or listen");
	puts("listening");
	fflush(stdout);
	return accept(tcp, NULL, NULL);
}

/* Sends the own address, and receives that of the peer. */
static void exchange_addresses(int tcp)
{
	struct ibv_port_attr port;
	struct qp_address own = {
		.addr = (unsigned long)words,
		.rkey = mr->rkey,
		.qpn = qp->qp_num,
	};

	check(!ibv_query_port(qp->context, PORT, &port), "ibv_query_port");
	own.lid = port.lid;
	check(write(tcp, &own, sizeof(own)) == sizeof(own), "write");
	check(recv(tcp, &peer, sizeof(peer), MSG_WAITALL) == sizeof(peer), "recv");
}

/* Polls the CQ once. */
static void poll_cq(void)
{
	struct ibv_wc wcs[16];
	int i, count = ibv_poll_cq(cq, 16, wcs);

	check(count >= 0, "ibv_poll_cq");
	for (i = 0; i < count; i++) {
		if (wcs[i].status == IBV_WC_SUCCESS)
			continue;
		fprintf(stderr, "%s\n", ibv_wc_status_str(wcs[i].status));
		exit(1);
	}
	atomic_fetch_add(&done, count);
}

static void *run_thread(void *unused)
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

		wr.wr.atomic.remote_addr = peer.addr;
		wr.wr.atomic.rkey = peer.rkey;
		wr.wr.atomic.compare_add = 1;
		/* The send queue is smaller than the number of requests. */
		while (ibv_post_send(qp, &wr, &bad))
			poll_cq();
	}
	while (atomic_load(&done) < TOTAL)
		poll_cq();
	return unused;
}

int main(int argc, char **argv)
{
	unsigned long i, sum = 0;
	pthread_t threads[THREADS];
	char end;
	int tcp;

	create_objects(argv[1]);
	tcp = open_socket(argc > 2 ? argv[2] : NULL);
	exchange_addresses(tcp);
	connect_qp();
	/* Wait until the QP of the peer is connected. */
	check(write(tcp, "", 1) == 1 && read(tcp, &end, 1) == 1, "waiting for the peer");
	if (argc == 2) {
		check(!read(tcp, &end, 1), "waiting for the client to exit");
		printf("%lu\n", words[0]);
		return 0;
	}
	for (i = 0; i < THREADS; i++)
		check(!pthread_create(&threads[i], NULL, run_thread, NULL), "pthread_create");
	for (i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	for (i = 0; i < TOTAL; i++)
		sum += words[i];
	printf("%lu\n", sum);
	return 0;
}
