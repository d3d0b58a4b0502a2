// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The tests of verbs in rdma-core, on a software ConnectX. Their authors wrote them for hardware.
//!
//! No test may fail. A skipped test must be in [`SKIPPED`], which gives the reason, and each entry of the table must
//! match a skipped test. So a new feature of the device removes its entry, and a lost one is detected.

use std::thread;
use std::time::Duration;

use kite_cluster::{Cluster, Fabric, Result};

/// Minimum number of passed tests.
const PASSED: usize = 154;

/// Timeout of all tests.
const LIMIT: Duration = Duration::from_secs(2100);

const ETHERNET: &str = "for ports of Ethernet: this one is of InfiniBand";
const OTHER_VENDOR: &str = "for RNICs of another vendor";
const GPU: &str = "needs a GPU";
const NO_IPOIB: &str = "the connection manager needs IPoIB and a subnet manager";
const NEWER: &str = "needs hardware later than ConnectX-5";
const SIGNATURE: &str = "signatures and encryption of data are not modelled";
const NOT_MODELLED: &str = "not modelled";

/// Prefixes of names of skipped tests, and the reasons.
const SKIPPED: &[(&str, &str)] = &[
    ("test_addr.AHTest.test_create_ah_roce", ETHERNET),
    ("test_cuda_dmabuf.", GPU),
    ("test_efa_srd.", OTHER_VENDOR),
    ("test_efadv.", OTHER_VENDOR),
    ("test_flow.", ETHERNET),
    (
        "test_mlx5_cq.DvCqTest.test_dv_cq_compression_flags",
        NOT_MODELLED,
    ),
    ("test_mlx5_crypto.", SIGNATURE),
    ("test_mlx5_cuda_umem.", GPU),
    (
        "test_mlx5_dc.DCTest.test_odp_dc_traffic",
        "only the older scheme of page faults is supported",
    ),
    (
        "test_mlx5_devx.Mlx5DevxRcTrafficTest.test_devx_rc_qp_send_imm_doorbell_less_traffic",
        NEWER,
    ),
    ("test_mlx5_dm_ops.", NEWER),
    ("test_mlx5_dma_memcpy.", NEWER),
    ("test_mlx5_dmabuf.", GPU),
    ("test_mlx5_dr.", ETHERNET),
    ("test_mlx5_flow.", ETHERNET),
    ("test_mlx5_lag_affinity.", "there is one port"),
    ("test_mlx5_mkey.Mlx5MkeyTest.test_mkey_sig", SIGNATURE),
    ("test_mlx5_ooo_qp.", NEWER),
    ("test_mlx5_pp.", ETHERNET),
    ("test_mlx5_rdmacm.Mlx5CMTestCase.", NO_IPOIB),
    ("test_mlx5_rdmacm.ReservedQPTest.", NO_IPOIB),
    ("test_mlx5_sched.", ETHERNET),
    (
        "test_mlx5_timestamp.TimeStampTest.test_timestamp_",
        ETHERNET,
    ),
    (
        "test_mlx5_uar.",
        "registers that take whole work requests are not offered: each word would be a trap",
    ),
    ("test_mlx5_udp_sport.", ETHERNET),
    ("test_mlx5_var.", "for virtio by hardware"),
    ("test_mlx5_vfio.", "takes the device from its driver"),
    ("test_mr.DmaBufMRTest.", GPU),
    ("test_mr.DmaBufTestCase.", GPU),
    (
        "test_odp.OdpTestCase.test_odp_implicit",
        "the emulated processor's address space is too large for keys of all of it",
    ),
    ("test_qp.QPTest.test_create_raw_qp", ETHERNET),
    ("test_qp.QPTest.test_query_raw_qp", ETHERNET),
    ("test_qpex.QpExTestCase.test_qp_ex_rc_atomic_write", NEWER),
    ("test_qpex.QpExTestCase.test_qp_ex_rc_flush", NEWER),
    ("test_rdmacm.", NO_IPOIB),
    ("test_rss_traffic.", ETHERNET),
    (
        "test_srq.SrqTestCase.test_resize_srq",
        "no mlx5 driver does",
    ),
    ("test_tag_matching.", NOT_MODELLED),
];

/// Splits a line of the runner into outcome, name and reason.
fn fields(line: &str) -> Option<[&str; 3]> {
    let mut fields = line.splitn(3, '\t');
    Some([fields.next()?, fields.next()?, fields.next()?])
}

/// Runs all tests, a part on each node. Returns their lines.
fn run(cluster: &Cluster) -> Result<String> {
    let nodes = cluster.nodes();
    let run = |number| {
        let line = format!(
            "/kite/tests/cluster/guest/programs/pyverbs {number}/{}",
            nodes.len()
        );
        cluster.node(number).command(line).limit(LIMIT).sh()
    };
    let outputs: Result<Vec<_>> = thread::scope(|scope| {
        let runs: Vec<_> = (1..=nodes.len())
            .map(|number| scope.spawn(move || run(number)))
            .collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    Ok(outputs?.join("\n"))
}

#[test]
#[ignore = "long"]
fn rdma_core_tests_pass() -> Result<()> {
    let cluster = Cluster::builder()
        .nodes(2)
        .cpus(1)
        .fabric(Fabric::Connectx)
        .boot()?;
    let output = run(&cluster)?;
    let of = |kind: &'static str| {
        let tests = output.lines().filter_map(fields);
        let tests = tests.filter(move |[outcome, ..]| *outcome == kind);
        tests
            .map(|[_, name, reason]| (name, reason))
            .collect::<Vec<_>>()
    };
    let (passed, failed, skipped) = (of("passed"), of("failed"), of("skipped"));
    println!(
        "{} passed, {} failed, {} skipped",
        passed.len(),
        failed.len(),
        skipped.len()
    );
    assert!(failed.is_empty(), "failed: {failed:#?}");
    let is_known = |name: &str| SKIPPED.iter().any(|(known, _)| name.starts_with(known));
    let unexpected: Vec<_> = skipped.iter().filter(|(name, _)| !is_known(name)).collect();
    assert!(
        unexpected.is_empty(),
        "skipped without a known reason: {unexpected:#?}"
    );
    let is_skipped = |known: &str| skipped.iter().any(|(name, _)| name.starts_with(known));
    let obsolete: Vec<_> = SKIPPED
        .iter()
        .filter(|(known, _)| !is_skipped(known))
        .collect();
    assert!(obsolete.is_empty(), "no longer skipped: {obsolete:#?}");
    assert!(passed.len() >= PASSED, "only {} passed", passed.len());
    cluster.shutdown()
}
