//! Where ranks of this host meet.

use std::net::TcpListener;
use std::time::Duration;

use foveate_shard::collectives::Meeting;

/// Where `ranks` ranks of this host meet: a port that nobody listens at now.
pub fn meeting(ranks: usize, deadline: Duration) -> Meeting {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    Meeting {
        host: "127.0.0.1".to_owned(),
        port,
        rank: 0,
        ranks,
        run: 7,
        attempt: 0,
        arrival: Duration::from_secs(20),
        deadline,
        silence: Duration::from_secs(10),
    }
}
