// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `readme`: the samples of `README.md` and `docs/guide.md`, which the build script extracts.

mod greet {
    include!(concat!(env!("OUT_DIR"), "/greet.rs"));

    pub(super) fn run() -> kite::Result<()> {
        greet()
    }
}

mod twice {
    include!(concat!(env!("OUT_DIR"), "/twice.rs"));

    pub(super) fn run(cluster: &Cluster, region: &Region) -> kite::Result<()> {
        twice(cluster, region)
    }
}

mod answer {
    include!(concat!(env!("OUT_DIR"), "/answer.rs"));

    pub(super) fn run(service: &Service) -> kite::Result<()> {
        answer(service)
    }
}

/// Runs the samples.
pub(crate) fn run() -> anyhow::Result<()> {
    greet::run()?;
    let cluster = kite::Cluster::open()?;
    let region = cluster.alloc(&kite::AllocOptions::new(4096).nodes([2]))?;
    twice::run(&cluster, &region)?;
    let mut back = [0; 5];
    region.read_at(&mut back, 100)?;
    anyhow::ensure!(&back == b"hello", "{back:?}");
    let region = cluster.alloc(&kite::AllocOptions::new(1))?;
    let service = region.serve(&kite::ServeOptions::new())?;
    let mut reply = [0; 5];
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| answer::run(&service));
        let len = region.call(0, b"hello", &mut reply)?;
        anyhow::ensure!(&reply[..len] == b"HELLO", "{reply:?}");
        let panicked = |_| anyhow::anyhow!("the server panicked");
        Ok(answer.join().map_err(panicked)??)
    })
}
