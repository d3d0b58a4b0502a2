// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Who uses kite: other kernel modules.

use kite_cluster::{Cluster, Result, Setup, SharedCluster, Turn};

static PAIR: SharedCluster = SharedCluster::new(|| Cluster::builder().name("users").nodes(2));

fn pair() -> Result<Turn<'static>> {
    let pair = PAIR.take()?;
    pair.start_kite(&Setup::default())?;
    Ok(pair)
}

#[test]
fn another_module_uses_memory_of_this_node_and_of_others() -> Result<()> {
    let pair = pair()?;
    let (one, two) = (pair.node(1), pair.node(2));
    for parameters in ["node=0", "node=2", "node=2 len=1", "node=2 len=4096"] {
        one.sh(&format!(
            "insmod /run/kite/build/user/kite_user.ko {parameters} && rmmod kite_user"
        ))?;
    }
    for node in [one, two] {
        let stats = node.stats()?;
        assert_eq!((stats["mappings"], stats["lent_bytes"]), (0, 0));
    }
    Ok(())
}
